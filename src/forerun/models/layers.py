"""The decoder's layers in torch: attention and a gated MLP on a residual stream; and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from forerun.models.checkpoint import WeightReader
from forerun.models.config import DecoderConfig, ExpertsConfig, QKNorm
from forerun.ops.attention import Attend
from forerun.ops.block_weight import BlockLinear
from forerun.ops.layers import GATINGS, Gating, Linear, RMSNorm
from forerun.ops.rotary import Rotation, rotate

Norm = Callable[[Tensor], Tensor]


class Product(Protocol):
    """x @ weight.T + bias, in torch or on the native kernels."""

    @property
    def num_bytes(self) -> int:
        """Bytes that a pass reads."""
        ...

    def __call__(self, x: Tensor, /) -> Tensor:
        """[T, inputs] -> [T, outputs]"""
        ...


ChangeProduct = Callable[[str, Product], Product]
"""Makes another product of one and its name within its layer."""


def unchanged(x: Tensor) -> Tensor:
    """Return `x`: stands where a layer has no norm."""
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionNorm:
    """Norms over all query heads together and all key heads together (OLMo 2, arXiv 2501.00656)."""

    query: RMSNorm
    key: RMSNorm

    def __call__(self, heads: Tensor) -> Tensor:
        """[T, num_heads + num_kv_heads, head_dim] -> the same shape"""
        packed, query_width = heads.flatten(1), len(self.query.weight)
        normed = self.query(packed[:, :query_width]), self.key(packed[:, query_width:])
        return torch.cat(normed, dim=1).view_as(heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttention:
    """Grouped-query attention (arXiv 2305.13245), which writes the KV cache of layer `index`."""

    index: int
    qkv: Product
    output: Product
    qk_norm: Norm  # of [T, num_heads + num_kv_heads, head_dim]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None = None  # [num_heads] fp32

    def __call__(self, hidden: Tensor, rotation: Rotation | None, attend: Attend) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        num_rotated = self.num_heads + self.num_kv_heads
        qkv = self.qkv(hidden).view(-1, num_rotated + self.num_kv_heads, self.head_dim)
        heads = self.qk_norm(qkv[:, :num_rotated])
        if rotation is not None:
            heads = rotate(heads, rotation)
        attended = attend(
            self.index,
            heads[:, : self.num_heads],
            heads[:, self.num_heads :],
            qkv[:, num_rotated:],
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
        )
        return self.output(attended.flatten(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMLP:
    """down(gating(gate(x), up(x))) (arXiv 2002.05202)."""

    gate_up: Product
    down: Product
    gating: Gating

    @property
    def products(self) -> list[Product]:
        """All products."""
        return [self.gate_up, self.down]

    def with_products(self, change: ChangeProduct) -> GatedMLP:
        """The same with what `change` makes of each product."""
        return replace(self, gate_up=change("gate_up", self.gate_up), down=change("down", self.down))

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.down(self.gating(gate, up))


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """Several MLPs, of which each token takes those that a router thinks best (arXiv 1701.06538, 2401.04088).

    The router's logits become probabilities in fp32; they weigh what the chosen experts give. `sums_to_one`: those of the
    chosen experts are divided by their sum.
    """

    router: Product  # [T, hidden_size] -> [T, num_experts]
    experts: Sequence[GatedMLP]
    num_chosen: int
    sums_to_one: bool

    @property
    def products(self) -> list[Product]:
        """All products: each token takes a part of them."""
        return [self.router, *(product for expert in self.experts for product in expert.products)]

    def with_products(self, change: ChangeProduct) -> MixtureOfExperts:
        """The same with what `change` makes of each product; an expert's have its number before their names."""

        def changed(number: int, expert: GatedMLP) -> GatedMLP:
            return expert.with_products(lambda name, product: change(f"expert.{number}.{name}", product))

        experts = [changed(number, expert) for number, expert in enumerate(self.experts)]
        return replace(self, router=change("router", self.router), experts=experts)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        weights, chosen = self.router(hidden).float().softmax(dim=-1).topk(self.num_chosen, dim=-1)
        if self.sums_to_one:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(hidden, dtype=torch.float32)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, place = torch.where(chosen == number)
            mixed[rows] += self.experts[number](hidden[rows]) * weights[rows, place, None]
        return mixed.to(hidden.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Attention, then MLP, each between two norms; both add their output to the residual stream."""

    attention: SelfAttention
    mlp: GatedMLP | MixtureOfExperts
    attention_in: Norm
    attention_out: Norm
    mlp_in: Norm
    mlp_out: Norm
    residual_scale: float

    def __call__(self, hidden: Tensor, rotation: Rotation | None, attend: Attend) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]; `rotation` is None in a layer without rotary embedding."""
        attended = self.attention_out(self.attention(self.attention_in(hidden), rotation, attend))
        hidden = self._add(hidden, attended)
        return self._add(hidden, self.mlp_out(self.mlp(self.mlp_in(hidden))))

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices."""
        return sum(product.num_bytes for product in (self.attention.qkv, self.attention.output, *self.mlp.products))

    def with_products(self, change: ChangeProduct) -> DecoderLayer:
        """The same with what `change` makes of each product."""
        attention = self.attention
        changed = replace(attention, qkv=change("qkv", attention.qkv), output=change("output", attention.output))
        return replace(self, attention=changed, mlp=self.mlp.with_products(change))

    @property
    def one_mlp(self) -> GatedMLP:
        """The MLP of a layer without experts."""
        assert isinstance(self.mlp, GatedMLP), "the layer has no experts"
        return self.mlp

    def _add(self, hidden: Tensor, update: Tensor) -> Tensor:
        return hidden + (update if self.residual_scale == 1.0 else update * self.residual_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class WideLayer(DecoderLayer):
    """EAGLE-3's layer: attention reads a second input beside the stream, [norm(beside); norm(stream)].

    The residual stream starts from the given stream, or from its norm (`starts_normed`).
    """

    beside_in: Norm
    starts_normed: bool

    def __call__(self, hidden: Tensor, rotation: Rotation | None, attend: Attend) -> Tensor:
        """[T, 2 * hidden_size], the stream last -> [T, hidden_size]"""
        beside, stream = hidden.chunk(2, dim=-1)
        normed = self.attention_in(stream)
        both = torch.cat([self.beside_in(beside), normed], dim=-1)
        hidden = self._add(normed if self.starts_normed else stream, self.attention(both, rotation, attend))
        return self._add(hidden, self.mlp(self.mlp_in(hidden)))


def read_norm(reader: WeightReader, config: DecoderConfig, name: str, *, width: int) -> RMSNorm:
    """Load one norm."""
    return read_rms_norm(reader, name, width, config.norm_eps, offset=config.norm_offset)


def read_rms_norm(reader: WeightReader, name: str, width: int, eps: float, *, offset: float) -> RMSNorm:
    """Load a norm whose stored weight lacks `offset`.

    The offset is added in fp32 and the sum stays fp32: bf16 is too coarse for small differences around 1.
    """
    if offset == 0.0:
        return RMSNorm(reader.tensor(name, (width,)), eps)
    dtype = torch.promote_types(reader.dtype, torch.float32)
    return RMSNorm(reader.tensor(name, (width,), dtype=dtype) + offset, eps)


def read_layer(reader: WeightReader, config: DecoderConfig, *, index: int) -> DecoderLayer:
    """Load layer `index`.

    Raises:
        ModelError: a tensor is missing or has another shape.
    """
    prefix = f"{config.root}layers.{index}."

    def norm(name: str | None) -> Norm:
        if name is None:
            return unchanged
        return read_norm(reader, config, f"{prefix}{name}.weight", width=config.hidden_size)

    return DecoderLayer(
        attention=read_attention(reader, config, f"{prefix}self_attn.", index=index),
        mlp=read_mlp(reader, config, f"{prefix}mlp.")
        if config.experts is None
        else read_experts(reader, config, config.experts, prefix),
        attention_in=norm(config.norms.attention_in),
        attention_out=norm(config.norms.attention_out),
        mlp_in=norm(config.norms.mlp_in),
        mlp_out=norm(config.norms.mlp_out),
        residual_scale=config.residual_scale,
    )


def read_attention(
    reader: WeightReader, config: DecoderConfig, prefix: str, *, index: int, width: int | None = None
) -> SelfAttention:
    """Load the attention of layer `index`; `width` is its input's, by default the hidden size.

    Raises:
        ModelError: a tensor is missing or has another shape.
    """
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {"q_proj": query_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    if config.stored_fused:
        parts = {"qkv_proj": query_rows + 2 * kv_rows}
    return SelfAttention(
        index=index,
        qkv=_read_fused(reader, prefix, parts, width=width or config.hidden_size, bias=config.qkv_bias),
        output=_read_fused(reader, prefix, {"o_proj": config.hidden_size}, width=query_rows, bias=config.output_bias),
        qk_norm=_read_qk_norm(reader, config, prefix),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        window=config.windows[index],
        soft_cap=config.attention_soft_cap,
        sinks=reader.tensor(f"{prefix}sinks", (config.num_heads,), dtype=torch.float32) if config.sinks else None,
    )


def _read_qk_norm(reader: WeightReader, config: DecoderConfig, prefix: str) -> Norm:
    if config.qk_norm is QKNorm.NONE:
        return unchanged
    per_head = config.qk_norm is QKNorm.HEAD
    query_width = config.head_dim if per_head else config.num_heads * config.head_dim
    key_width = config.head_dim if per_head else config.num_kv_heads * config.head_dim
    query = read_norm(reader, config, f"{prefix}q_norm.weight", width=query_width)
    key = read_norm(reader, config, f"{prefix}k_norm.weight", width=key_width)
    if not per_head:
        return ProjectionNorm(query=query, key=key)
    weights = [query.weight.expand(config.num_heads, -1), key.weight.expand(config.num_kv_heads, -1)]
    return RMSNorm(torch.cat(weights), config.norm_eps)


def read_mlp(reader: WeightReader, config: DecoderConfig, prefix: str) -> GatedMLP:
    """Load a gated MLP.

    Raises:
        ModelError: a tensor is missing or has another shape.
    """
    inner = config.intermediate_size
    parts = {"gate_up_proj": 2 * inner} if config.stored_fused else {"gate_proj": inner, "up_proj": inner}
    return GatedMLP(
        gate_up=_read_fused(reader, prefix, parts, width=config.hidden_size, bias=config.mlp_bias),
        down=_read_fused(reader, prefix, {"down_proj": config.hidden_size}, width=inner, bias=config.mlp_bias),
        gating=GATINGS[config.activation],
    )


def read_experts(reader: WeightReader, config: DecoderConfig, experts: ExpertsConfig, prefix: str) -> MixtureOfExperts:
    """Load a mixture of experts.

    Raises:
        ModelError: a tensor is missing or has another shape.
    """
    width, inner, names = config.hidden_size, experts.inner_size, experts.names

    def expert(number: int) -> GatedMLP:
        gate, up, down = (name.format(number) for name in (names.gate, names.up, names.down))
        return GatedMLP(
            gate_up=_read_fused(reader, prefix, {gate: inner, up: inner}, width=width, bias=experts.bias),
            down=_read_fused(reader, prefix, {down: width}, width=inner, bias=experts.bias),
            gating=GATINGS[config.activation],
        )

    return MixtureOfExperts(
        router=_read_fused(reader, prefix, {names.router: experts.num_experts}, width=width, bias=experts.bias),
        experts=[expert(number) for number in range(experts.num_experts)],
        num_chosen=experts.num_chosen,
        sums_to_one=experts.sums_to_one,
    )


def _read_fused(
    reader: WeightReader, prefix: str, parts: dict[str, int], *, width: int, bias: bool
) -> Linear | BlockLinear:
    """Load several projections {name: outputs} of one input as one matrix."""
    return reader.linear([prefix + name for name in parts], list(parts.values()), width=width, bias=bias)
