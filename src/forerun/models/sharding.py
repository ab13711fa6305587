"""Which outputs of a decoder's products each rank of a tensor-parallel group computes, and copies of their weights."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ConfigError
from forerun.models.config import DecoderConfig, QKNorm
from forerun.ops.block_weight import GATES_AT_ONCE
from forerun.ops.native.formats.base import PackedWeight
from forerun.ops.native.layers import NativeLayer, PackedLinear
from forerun.ops.native.library import Kernels
from forerun.ops.native.memory import Arena
from forerun.ops.native.sharded.weights import take_outputs, take_tiles
from forerun.ops.native.structs import MOST_RANKS, TILE, LayerShardStruct, LayerStruct


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of a decoder: key and value heads with the query heads that read them, all else in tiles of 32 outputs.

    Shares differ by one group of heads, or one tile, where they cannot be equal; the first ranks then have more. Where each
    rank can have its fair share of the key heads in a window that is no wider than that, two ranks have the head at a border:
    both compute it and keep its KV, and take turns with the rows that attend to it. So three heads on two ranks are one and a
    half each.
    """

    config: DecoderConfig
    rank: int
    num_ranks: int

    def __post_init__(self) -> None:
        """Check that every rank gets a query head.

        Raises:
            ConfigError: there are more ranks than query heads.
        """
        most = min(self.config.num_heads, MOST_RANKS)
        if self.num_ranks > most:
            raise ConfigError(
                f"tensor_parallel_size: got {self.num_ranks}; this model has {self.config.num_heads} query heads, of which "
                f"each process needs one: may be 1 to {most}"
            )

    @property
    def kv_heads(self) -> range:
        """Its key and value heads."""
        if self._shares_heads:
            return _window(self.config.num_kv_heads, self.rank, self.num_ranks)
        return share_of(self.config.num_kv_heads, self.rank, self.num_ranks)

    @property
    def heads(self) -> range:
        """The query heads that read them."""
        group = self.config.num_heads // self.config.num_kv_heads
        return range(self.kv_heads.start * group, self.kv_heads.stop * group)

    def turns(self, kv_head: int) -> range:
        """Of each `num_ranks` items of attention to one of its key heads those that it computes: others compute the rest."""
        if not self._shares_heads:
            return range(self.num_ranks)
        count, begin = self.config.num_kv_heads, kv_head * self.num_ranks
        first, last = max(count * self.rank, begin), min(count * (self.rank + 1), begin + self.num_ranks)
        return range(first - begin, last - begin)

    @property
    def _shares_heads(self) -> bool:
        count = self.config.num_kv_heads
        if self.num_ranks > count:
            return True
        widest = max(len(_window(count, rank, self.num_ranks)) for rank in range(self.num_ranks))
        return widest <= -(-count // self.num_ranks)

    @property
    def qkv_outputs(self) -> list[range]:
        """Its outputs of the product that gives all queries, then all keys, then all values."""
        dim, keys = self.config.head_dim, self.config.num_heads * self.config.head_dim
        values = keys + self.config.num_kv_heads * dim
        first, last = self.kv_heads.start * dim, self.kv_heads.stop * dim
        return [
            range(self.heads.start * dim, self.heads.stop * dim),
            range(keys + first, keys + last),
            range(values + first, values + last),
        ]

    @property
    def output_tiles(self) -> range:
        """Its tiles of the products that add to the residual stream."""
        return tiles_of(self.config.hidden_size, self.rank, self.num_ranks)

    @property
    def gate_tiles(self) -> range:
        """Its tiles of gates and ups, each of `GATES_AT_ONCE` gates and their ups."""
        return share_of(-(-self.config.intermediate_size // GATES_AT_ONCE), self.rank, self.num_ranks)

    @property
    def head_tiles(self) -> range:
        """Its tiles of the vocabulary."""
        return tiles_of(self.config.vocab_size, self.rank, self.num_ranks)

    @property
    def norms_all_heads(self) -> bool:
        """Whether one norm runs over the queries, or the keys, of all ranks."""
        return self.config.qk_norm is QKNorm.PROJECTION

    def struct(self) -> LayerShardStruct:
        """Where its outputs lie, for the kernels."""
        return LayerShardStruct(
            first_head=self.heads.start,
            first_kv_head=self.kv_heads.start,
            num_kv_heads=self.config.num_kv_heads,
            first_part=self.turns(self.kv_heads[0]).start,
            end_part=self.turns(self.kv_heads[-1]).stop,
            first_output=self.output_tiles.start * TILE,
            first_gate=self.gate_tiles.start * GATES_AT_ONCE,
        )


def part_of_layer(kernels: Kernels, layer: NativeLayer, shard: Shard, arena: Arena) -> NativeLayer:
    """A copy of a rank's outputs of a layer, in memory of the arena.

    Raises:
        ModelError: the heads of a weight in several block formats would not be whole tiles.
    """
    tiles = {"output": shard.output_tiles, "gate_up": shard.gate_tiles, "down": shard.output_tiles}
    weights = {"qkv": take_outputs(kernels, layer.weights["qkv"], shard.qkv_outputs, arena)}
    weights |= {name: take_tiles(layer.weights[name], [part], arena) for name, part in tiles.items()}
    norms = dict(layer.norms)
    if not shard.norms_all_heads:
        own = {"query_norm": shard.heads, "key_norm": shard.kv_heads}
        norms |= {name: norms[name][heads.start : heads.stop] for name, heads in own.items() if name in norms}
    struct = LayerStruct.from_buffer_copy(layer.struct)
    struct.attention.num_heads = len(shard.heads)
    struct.attention.num_kv_heads = len(shard.kv_heads)
    sinks = None if layer.sinks is None else layer.sinks[shard.heads.start : shard.heads.stop]
    return NativeLayer(struct=struct, weights=weights, norms=norms, sinks=sinks)


def part_of_head(head: PackedLinear, shard: Shard, arena: Arena) -> PackedWeight:
    """A copy of a rank's outputs of a head, in memory of the arena."""
    return take_tiles(head.weight, [shard.head_tiles], arena)


def tiles_of(num_outputs: int, rank: int, num_ranks: int) -> range:
    """A rank's tiles of a product's outputs."""
    return share_of(-(-num_outputs // TILE), rank, num_ranks)


def _window(count: int, rank: int, num_ranks: int) -> range:
    """The whole things in which a rank's fair share of `count` of them lies."""
    return range(count * rank // num_ranks, -(-count * (rank + 1) // num_ranks))


def share_of(count: int, rank: int, num_ranks: int) -> range:
    """A rank's part of `count` things, which are shared out one after the other; the first ranks have one more."""
    each, surplus = divmod(count, num_ranks)
    first = each * rank + min(rank, surplus)
    return range(first, first + each + (rank < surplus))
