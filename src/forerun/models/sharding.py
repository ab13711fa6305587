"""Which outputs of a decoder's products each rank of a tensor-parallel group computes."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ConfigError
from forerun.models.config import DecoderConfig, QKNorm
from forerun.ops.native.structs import MOST_RANKS, TILE, LayerShardStruct

LANES = 16
"""Gates in a tile of gates and ups."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of a decoder: heads by groups that share keys, all else in tiles of 32 outputs.

    Shares differ by one group or tile where they cannot be equal; the first ranks then have more.
    """

    config: DecoderConfig
    rank: int
    num_ranks: int

    def __post_init__(self) -> None:
        """Check that every rank gets a group of heads.

        Raises:
            ConfigError: there are more ranks than groups.
        """
        most = min(self.config.num_kv_heads, MOST_RANKS)
        if self.num_ranks > most:
            raise ConfigError(
                f"tensor_parallel_size: got {self.num_ranks}; this model has {self.config.num_kv_heads} key-value heads, of "
                f"which each process needs one: may be 1 to {most}"
            )

    @property
    def kv_heads(self) -> range:
        """Its key and value heads."""
        return self._share(self.config.num_kv_heads)

    @property
    def heads(self) -> range:
        """The query heads that share its keys."""
        group = self.config.num_heads // self.config.num_kv_heads
        return range(self.kv_heads.start * group, self.kv_heads.stop * group)

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
        return self._share(-(-self.config.hidden_size // TILE))

    @property
    def gate_tiles(self) -> range:
        """Its tiles of gates and ups, each of `LANES` gates and their ups."""
        return self._share(-(-self.config.intermediate_size // LANES))

    @property
    def head_tiles(self) -> range:
        """Its tiles of the vocabulary."""
        return self._share(-(-self.config.vocab_size // TILE))

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
            first_output=self.output_tiles.start * TILE,
            first_gate=self.gate_tiles.start * LANES,
        )

    def _share(self, count: int) -> range:
        each, surplus = divmod(count, self.num_ranks)
        first = each * self.rank + min(self.rank, surplus)
        return range(first, first + each + (self.rank < surplus))
