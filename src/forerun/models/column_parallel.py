"""Layers and heads in torch of which each rank computes some outputs; the native kernels' are in `sharding.py`.

Outputs are shared out (column parallel, Megatron-LM, arXiv 1909.08053), sums never are: before a product whose input is
shared out its parts are gathered, where Megatron's row-parallel layers add partial sums, which would round otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.models.config import DecoderConfig
from forerun.models.layers import DecoderLayer, GatedMLP, Norm, Product, ProjectionNorm, SelfAttention, unchanged
from forerun.models.sharding import share_of
from forerun.ops.collectives import Collectives
from forerun.ops.layers import Linear, RMSNorm


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query heads of one rank, and the key and value heads that they read."""

    heads: range
    kv_heads: range


def head_shares(config: DecoderConfig, num_ranks: int) -> list[HeadShare]:
    """Share out heads: whole groups of query heads that read one key head, or parts of equal size of such groups.

    A key head whose group is divided is on several ranks.

    Raises:
        ConfigError: there are more ranks than key heads, and groups cannot be divided so; the message says how many can be.
    """
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    group = num_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        kv_heads = [share_of(num_kv_heads, rank, num_ranks) for rank in range(num_ranks)]
        return [HeadShare(range(own.start * group, own.stop * group), own) for own in kv_heads]
    holders = [number for number in range(2, group + 1) if group % number == 0]  # of one key head
    if num_ranks not in [number * num_kv_heads for number in holders]:
        may_be = [*range(1, num_kv_heads + 1), *(number * num_kv_heads for number in holders)]
        raise ConfigError(
            f"tensor_parallel_size: got {num_ranks}; {num_kv_heads} key heads, each read by {group} query heads, can be shared "
            f"out among {', '.join(map(str, may_be))}"
        )
    each = num_heads // num_ranks
    return [
        HeadShare(range(rank * each, (rank + 1) * each), range(rank * each // group, rank * each // group + 1))
        for rank in range(num_ranks)
    ]


@dataclass(frozen=True, slots=True)
class ColumnParallelLinear:
    """x @ weight.T + bias, of which this rank computes the outputs of `own`, and all ranks get all.

    `widths` are the outputs of each rank; `input_widths` the parts of x that they have, None where each has the whole of it.
    """

    own: Linear
    collectives: Collectives
    widths: Sequence[int]
    input_widths: Sequence[int] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that a pass reads here."""
        return self.own.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """[T, this rank's inputs] -> [T, outputs of all ranks]"""
        if self.input_widths is not None:
            x = self.collectives.gather(x, self.input_widths)
        return self.collectives.gather(self.own(x), self.widths)


@dataclass(frozen=True, slots=True)
class GatheredProjectionNorm:
    """A `ProjectionNorm` of which each rank has some heads: it is computed of all of them."""

    norm: ProjectionNorm
    collectives: Collectives
    shares: Sequence[HeadShare]

    def __call__(self, heads: Tensor) -> Tensor:
        """[T, own query heads + own key heads, head_dim] -> the same shape"""
        dim = heads.shape[2]
        widths = [(len(share.heads) + len(share.kv_heads)) * dim for share in self.shares]
        gathered = torch.split(self.collectives.gather(heads.flatten(1), widths), widths, dim=1)
        parts = [torch.unflatten(part, 1, (-1, dim)) for part in gathered]
        queries = [part[:, : len(share.heads)] for part, share in zip(parts, self.shares, strict=True)]
        keys: list[Tensor] = []
        known = 0
        for part, share in zip(parts, self.shares, strict=True):
            new = range(max(known, share.kv_heads.start), share.kv_heads.stop)  # a rank before may have them, too
            first = len(share.heads) + new.start - share.kv_heads.start
            keys.append(part[:, first : first + len(new)])
            known = share.kv_heads.stop
        normed = self.norm(torch.cat([*queries, *keys], dim=1))
        own = self.shares[self.collectives.rank]
        num_heads = sum(len(share.heads) for share in self.shares)
        own_keys = normed[:, num_heads + own.kv_heads.start : num_heads + own.kv_heads.stop]
        return torch.cat([normed[:, own.heads.start : own.heads.stop], own_keys], dim=1)


class ColumnParallel:
    """Takes one rank's part of layers and heads."""

    def __init__(self, collectives: Collectives) -> None:
        """Take the part of a rank that gathers outputs by `collectives`."""
        self.collectives = collectives

    def layer(self, layer: DecoderLayer, config: DecoderConfig) -> DecoderLayer:
        """A copy of this rank's part of a layer.

        Raises:
            ConfigError: so many ranks cannot share its heads out.
        """
        return replace(layer, attention=self._attention(layer.attention, config), mlp=self._mlp(layer.one_mlp, config))

    def linear(self, product: Product, *, input_widths: Sequence[int] | None = None) -> ColumnParallelLinear:
        """A copy of this rank's part of a product, of whose input ranks have parts of `input_widths`."""
        linear = dense(product)
        shares = self._shares(len(linear.weight))
        own = take_outputs(linear, [shares[self.collectives.rank]])
        return ColumnParallelLinear(own, self.collectives, [len(share) for share in shares], input_widths)

    def _attention(self, attention: SelfAttention, config: DecoderConfig) -> SelfAttention:
        shares = head_shares(config, self.collectives.num_ranks)
        own, dim, num_heads = shares[self.collectives.rank], config.head_dim, config.num_heads
        keys, values = num_heads, num_heads + config.num_kv_heads
        rows = [
            own.heads,
            range(keys + own.kv_heads.start, keys + own.kv_heads.stop),
            range(values + own.kv_heads.start, values + own.kv_heads.stop),
        ]
        return replace(
            attention,
            qkv=take_outputs(dense(attention.qkv), [range(part.start * dim, part.stop * dim) for part in rows]),
            output=self.linear(attention.output, input_widths=[len(share.heads) * dim for share in shares]),
            qk_norm=self._qk_norm(attention.qk_norm, shares, rows[:2]),
            num_heads=len(own.heads),
            num_kv_heads=len(own.kv_heads),
            sinks=None if attention.sinks is None else attention.sinks[own.heads.start : own.heads.stop],
        )

    def _qk_norm(self, norm: Norm, shares: Sequence[HeadShare], rows: Sequence[range]) -> Norm:
        if isinstance(norm, ProjectionNorm):
            return GatheredProjectionNorm(norm, self.collectives, shares)
        if isinstance(norm, RMSNorm):
            return RMSNorm(torch.cat([norm.weight[part.start : part.stop] for part in rows]), norm.eps)
        assert norm is unchanged
        return norm

    def _mlp(self, mlp: GatedMLP, config: DecoderConfig) -> GatedMLP:
        inner = config.intermediate_size
        shares = self._shares(inner)
        own = shares[self.collectives.rank]
        rows = [own, range(inner + own.start, inner + own.stop)]
        return replace(
            mlp,
            gate_up=take_outputs(dense(mlp.gate_up), rows),
            down=self.linear(mlp.down, input_widths=[len(share) for share in shares]),
        )

    def _shares(self, count: int) -> list[range]:
        return [share_of(count, rank, self.collectives.num_ranks) for rank in range(self.collectives.num_ranks)]


def take_outputs(linear: Linear, rows: Sequence[range]) -> Linear:
    """A copy of some outputs of a product, so that the memory of the others can be freed."""

    def take(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[part.start : part.stop] for part in rows])

    return Linear(take(linear.weight), None if linear.bias is None else take(linear.bias))


def dense(product: Product) -> Linear:
    """A product in torch, which is dense: blocks of four bits are for the native kernels."""
    assert isinstance(product, Linear)
    return product
