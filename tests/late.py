"""Engines whose steps need no word from the host between two launches: the tiny model, with attention by the formulas of `ops.cuda`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.kv.cache import KVCache
from forerun.ops.attention.paged import PagedAttention
from forerun.ops.cuda.attention import attend
from forerun.ops.cuda.table import DeviceTable, StepRows
from tests.engines import tiny_llm, tiny_target


class RowAttention(PagedAttention):
    """Attends to rows that the device has laid out; drafters, whose rows the host lays out, attend as ever."""

    def begin_step(self, rows, block_table, cache):
        return RowPass(
            rows,
            DeviceTable(**dict.fromkeys(DeviceTable.__dataclass_fields__, None) | {"block_table": block_table}),
            cache,
        )


@dataclass(frozen=True)
class RowPass:
    rows: StepRows
    table: DeviceTable
    cache: KVCache

    def __call__(self, layer, query, key, value, **settings):
        kv, real = self.cache.layers[layer], self.rows.kv_slots >= 0
        kv.key[self.rows.kv_slots[real]] = key[real]
        kv.value[self.rows.kv_slots[real]] = value[real]
        output = query.new_zeros(*query.shape[:2], value.shape[2])
        attend(query, kv.key, kv.value, output, self.rows, self.table, block_size=self.cache.block_size, **settings)
        return output


def late_target():
    return replace(tiny_target(), attention=RowAttention())


def late_llm(config=None, **settings):
    return tiny_llm(config, target=late_target(), **({"device_step": True} | settings))
