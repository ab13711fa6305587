"""Attention over the paged cache by the functions of `ops.cuda`, for rows that the device or the host has laid out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.kv.cache import KVCache
from forerun.ops.cuda.functions import LayerFunctions
from forerun.ops.cuda.table import StepRows
from forerun.ops.rotary import Rotation

Ints = npt.NDArray[np.int64]


class DeviceAttention:
    """Implements `Attention`: a row's bits depend on its own text alone.

    Args:
        functions: compute it.
    """

    def __init__(self, functions: LayerFunctions) -> None:
        self.functions = functions

    def begin(self, batch: ForwardBatch, cache: KVCache) -> DevicePass:
        """Lay out a batch's rows on the host."""
        laid_out = lay_out_rows(batch)
        hidden = {sequence.num_hidden for sequence in batch.sequences}
        if len(hidden) > 1:
            raise ValueError(f"num_hidden: got {sorted(hidden)} in one pass; must be the same for all of its sequences")
        return DevicePass(self.functions, cache, laid_out.rows, laid_out.block_table, num_hidden=max(hidden, default=0))

    def begin_step(self, rows: StepRows, block_table: Tensor, cache: KVCache, *, num_hidden: int = 0) -> DevicePass:
        """Attend for rows that the device has laid out: the host does not look at them."""
        return DevicePass(self.functions, cache, rows, block_table, num_hidden=num_hidden)


class DevicePass:
    """`Attend` for one pass over `cache`; the layers of `DeviceLayers` call `write_and_attend`.

    Args:
        functions: compute it.
        cache: keys, values and features.
        rows: slots, positions, kv_slots, num_linear and path_slots are read.
        block_table: [S, B] int32, the blocks of each slot.
        num_hidden: leading places of all texts that hold no entry.
    """

    def __init__(
        self, functions: LayerFunctions, cache: KVCache, rows: StepRows, block_table: Tensor, *, num_hidden: int
    ) -> None:
        self.functions = functions
        self.cache = cache
        self.rows = rows
        self.block_table = block_table
        self._num_hidden = num_hidden

    def write_and_attend(
        self,
        layer: int,
        qkv: Tensor,
        rotation: Rotation | None,
        *,
        norms: Mapping[str, Tensor],
        eps: float,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to the cache, then attend.

        Args:
            layer: index of the layer's cache.
            qkv: [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
            rotation: of each row, or None.
            norms: `query_norm` and `key_norm` of `rotate_and_write`; empty: none.
            eps: of the norms.
            scale: see `Attend`, as the rest.

        Returns:
            [T, num_heads, head_dim] in the cache's dtype.
        """
        kv = self.cache.layers[layer]
        num_heads = qkv.shape[1] - 2 * kv.key.shape[1]
        query = torch.empty(len(qkv), num_heads, qkv.shape[2], dtype=kv.key.dtype, device=qkv.device)
        self.functions.rotate_and_write(*(qkv, query, kv.key, kv.value, self.rows.kv_slots, rotation), **norms, eps=eps)
        return self._attend(layer, query, scale=scale, window=window, soft_cap=soft_cap)

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Attend`: for layers in torch. Padding rows are not written."""
        kv = self.cache.layers[layer]
        for entries, rows in ((kv.key, key), (kv.value, value)):
            self.functions.keep(rows.flatten(1).contiguous(), self.rows.kv_slots, entries.flatten(1))
        sinks = None if sinks is None else sinks.float().contiguous()
        rows_of_cache = query.to(kv.key.dtype).contiguous()
        attended = self._attend(layer, rows_of_cache, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
        return attended.to(query.dtype)

    def keep(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Write hidden states [T, width] to the cache's features of those names; return those that it does not keep."""
        for name in features.keys() & self.cache.features.keys():
            self.functions.keep(features[name], self.rows.kv_slots, self.cache.features[name])
        return {name: rows for name, rows in features.items() if name not in self.cache.features}

    def _attend(self, layer: int, query: Tensor, *, sinks: Tensor | None = None, **options: float | None) -> Tensor:
        kv = self.cache.layers[layer]
        attended = torch.empty(*query.shape[:2], kv.value.shape[2], dtype=query.dtype, device=query.device)
        self.functions.attend(
            *(query, kv.key, kv.value, attended, self.rows, self.block_table),
            block_size=self.cache.block_size,
            sinks=sinks,
            num_hidden=self._num_hidden,
            **options,
        )
        return attended


class LaidOutRows(NamedTuple):
    """A batch's rows, and the blocks of its sequences [S, B]."""

    rows: StepRows
    block_table: Tensor


def lay_out_rows(batch: ForwardBatch) -> LaidOutRows:
    """The rows of a batch as attention on the device reads them.

    A row's position counts the places that it sees: where a tree mask lets it see its ancestors alone, that is its place in
    the text.
    """
    num_blocks = max([1, *(len(sequence.block_ids) for sequence in batch.sequences)])
    paths = [_paths(sequence, batch.block_size) for sequence in batch.sequences]
    longest_path = 16 * -(-max([1, *(path.slots.shape[1] for path in paths)]) // 16)  # few widths, few compiled kernels
    num_rows, num_sequences = len(batch.slot_mapping), len(batch.sequences)
    # Each column, and the block table, begin at sixteen bytes: so triton compiles one kernel for all numbers of rows.
    laid_out = np.zeros((-(-num_rows // 4) * 4, 3 + longest_path), dtype=np.int32)
    block_table = np.zeros((num_sequences, num_blocks), dtype=np.int32)
    first = 0
    for number, (sequence, path) in enumerate(zip(batch.sequences, paths, strict=True)):
        own = laid_out[first : first + sequence.num_rows]
        own[:, 0], own[:, 1], own[:, 2] = number, path.num_seen - 1, path.num_linear
        own[:, 3 : 3 + path.slots.shape[1]] = path.slots
        block_table[number, : len(sequence.block_ids)] = sequence.block_ids
        first += sequence.num_rows
    device = batch.slot_mapping.device
    sent = torch.from_numpy(np.concatenate([laid_out.T.ravel(), block_table.ravel()])).to(device)  # in one copy
    rest = sent[laid_out.size :].view(num_sequences, num_blocks)
    columns = sent[: laid_out.size].view(3 + longest_path, len(laid_out))[:, :num_rows]
    rows = StepRows(
        tokens=batch.token_ids,
        positions=columns[1],
        slots=columns[0],
        parents=columns[0],
        kv_slots=batch.slot_mapping,
        num_linear=columns[2],
        path_slots=columns[3:].T.contiguous(),
        first_rows=columns[0],
        judged=columns[0],
        first_judged=columns[0],
    )
    return LaidOutRows(rows, rest)


class _Paths(NamedTuple):
    """Of each row of a sequence: how many places it sees, how many of them in the order of the text, and where the rest are."""

    num_seen: Ints
    num_linear: Ints
    slots: Ints  # [num_rows, the most that any row has]


def _paths(sequence: SequenceRows, block_size: int) -> _Paths:
    num_rows, mask = sequence.num_rows, sequence.tree_mask
    if mask is None:
        num_seen = sequence.num_context + 1 + np.arange(num_rows)
        return _Paths(num_seen, num_seen, np.empty((num_rows, 0), dtype=np.int64))
    sees = mask.cpu().numpy()
    base = sequence.num_context + num_rows - sees.shape[1]  # places before this one are seen by all
    num_seen = sees.sum(axis=1)
    num_linear = np.cumprod(sees, axis=1).sum(axis=1)
    slots = np.zeros((num_rows, int((num_seen - num_linear).max(initial=0))), dtype=np.int64)
    for row, linear in enumerate(num_linear):
        places = base + np.flatnonzero(sees[row])[linear:]
        slots[row, : len(places)] = (
            sequence.block_ids[places // block_size] * np.int64(block_size) + places % block_size
        )
    return _Paths(base + num_seen, base + num_linear, slots)
