"""A decoder's layers, norms, embedding and head by the functions of `ops.cuda`: twins of those in torch.

The residual stream is fp32, and so is whatever lies between two products; what enters a product is rounded to the weight's
dtype. Every intermediate is one of torch's tensors, in a fixed order of calls, and its shape depends on the number of rows
alone, so that a CUDA graph can hold a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.batch import Candidates
from forerun.ops.candidates import find_candidates
from forerun.ops.cuda.functions import LayerFunctions
from forerun.ops.cuda.passes import DevicePass
from forerun.ops.rotary import Rotary, Rotation


@dataclass(frozen=True, slots=True)
class DeviceLinear:
    """x @ weight.T + bias, the twin of `ops.layers.Linear`."""

    functions: LayerFunctions
    weight: Tensor
    bias: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that a pass reads."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], in x's dtype."""
        return self.wide(x).to(x.dtype)

    def wide(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out] fp32"""
        output = _rows_like(x, len(self.weight))
        self.functions.linear(self.rounded(x), self.weight, output, bias=self.bias)
        return output

    def rounded(self, x: Tensor) -> Tensor:
        """What is multiplied: x in the weight's dtype."""
        return x.to(self.weight.dtype).contiguous()

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs: [n] int64 -> [n, in]"""
        return self.weight[outputs]


@dataclass(frozen=True, slots=True)
class DeviceHead:
    """Logits: a product, a scale and a soft cap, the twin of `ops.layers.Head`."""

    linear: DeviceLinear
    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, normed: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] fp32"""
        linear, logits = self.linear, _rows_like(normed, len(self.linear.weight))
        linear.functions.capped_linear(
            linear.rounded(normed), linear.weight, logits, factor=self.scale, cap=self.soft_cap or 0.0
        )
        return logits

    def with_candidates(self, normed: Tensor, num_candidates: int) -> tuple[Tensor, Candidates]:
        """[R, hidden_size] -> logits [R, vocab_size] fp32 and the candidates of each row."""
        logits = self(normed)
        return logits, find_candidates(logits, num_candidates)


@dataclass(frozen=True, slots=True)
class DeviceEmbedding:
    """Rows of a table, times `scale`, the twin of `ops.layers.Embedding`."""

    functions: LayerFunctions
    table: Tensor
    scale: float = 1.0

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size] fp32"""
        hidden = torch.empty(len(token_ids), self.table.shape[1], dtype=torch.float32, device=self.table.device)
        self.functions.embed(token_ids, self.table, hidden, scale=self.scale)
        return hidden


@dataclass(frozen=True, slots=True)
class DeviceRMSNorm:
    """RMSNorm, the twin of `ops.layers.RMSNorm` over rows [T, width]."""

    functions: LayerFunctions
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[T, width] -> [T, width] fp32"""
        output = _rows_like(x, x.shape[1])
        self.functions.rms_norm(x, self.weight, output, eps=self.eps)
        return output


class DeviceRotary:
    """A `Rotary` that looks its rotations up in a table of the first `num_positions`, computed once."""

    def __init__(self, rotary: Rotary, *, num_positions: int) -> None:
        self._table = rotary.rotation(torch.arange(num_positions, device=rotary.device))

    def rotation(self, positions: Tensor) -> Rotation:
        """Rotation of rows at `positions` [T] int64."""
        return Rotation(self._table.cos.index_select(0, positions), self._table.sin.index_select(0, positions))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayer:
    """The weights and rules of one layer; see `models.layers.DecoderLayer`, and `WideLayer` for those with a `beside_in`.

    A norm of None is no norm. `head_norms` are `query_norm` and `key_norm` over each head, `projection_norms` those over all
    heads together.
    """

    index: int
    qkv: DeviceLinear
    output: DeviceLinear
    gate_up: DeviceLinear
    down: DeviceLinear
    attention_in: Tensor | None
    attention_out: Tensor | None
    mlp_in: Tensor | None
    mlp_out: Tensor | None
    head_norms: Mapping[str, Tensor]
    projection_norms: tuple[Tensor, Tensor] | None
    eps: float
    num_heads: int
    num_kv_heads: int
    scale: float
    window: int | None
    soft_cap: float | None
    activation: str
    residual_scale: float
    beside_in: Tensor | None = None
    starts_normed: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices."""
        return sum(product.num_bytes for product in (self.qkv, self.output, self.gate_up, self.down))


class DeviceLayers:
    """The twin of `TorchLayers`: layer i takes rotation number `rotation_of[i]` of a pass."""

    def __init__(self, functions: LayerFunctions, layers: Sequence[DeviceLayer], rotation_of: Sequence[int]) -> None:
        self.layers = layers
        self._functions = functions
        self._rotation_of = rotation_of

    def __call__(
        self, hidden: Tensor, rotations: list[Rotation | None], attend: DevicePass, first: int, last: int
    ) -> Tensor:
        """Rows [T, width that layer `first` reads] -> the residual stream after layer `last` - 1, [T, hidden_size] fp32."""
        stream = hidden.to(torch.float32, copy=True)  # which layers change in place
        for layer, rotation in zip(self.layers[first:last], self._rotation_of[first:last], strict=True):
            if layer.beside_in is None:
                x = self._normed(layer, stream, layer.attention_in)
            else:
                x, stream = self._begin_wide(layer, stream)
            self._attention(layer, x, rotations[rotation], attend, stream)
            self._mlp(layer, stream)
        return stream

    def _begin_wide(self, layer: DeviceLayer, both: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, [norm(beside); norm(stream)], and the residual stream: [T, 2 * width] -> [T, 2 * width], [T, width]."""
        norm, width = self._functions.rms_norm, both.shape[1] // 2
        x = torch.empty_like(both, dtype=layer.qkv.weight.dtype)
        norm(both[:, :width], layer.beside_in, x[:, :width], eps=layer.eps)
        norm(both[:, width:], layer.attention_in, x[:, width:], eps=layer.eps)
        stream = _rows_like(both, width)
        norm(both[:, width:], layer.attention_in if layer.starts_normed else None, stream, eps=layer.eps)
        return x, stream

    def _attention(
        self, layer: DeviceLayer, x: Tensor, rotation: Rotation | None, attend: DevicePass, stream: Tensor
    ) -> None:
        qkv = layer.qkv.wide(x)
        num_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
        head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
        if layer.projection_norms is not None:
            queries, keys = qkv[:, : num_heads * head_dim], qkv[:, num_heads * head_dim :][:, : num_kv_heads * head_dim]
            for heads, weight in zip((queries, keys), layer.projection_norms, strict=True):
                self._functions.rms_norm(heads, weight, heads, eps=layer.eps)
        attended = attend.write_and_attend(
            layer.index,
            qkv.view(len(qkv), -1, head_dim),
            rotation,
            norms=layer.head_norms,
            eps=layer.eps,
            scale=layer.scale,
            window=layer.window,
            soft_cap=layer.soft_cap,
        )
        self._add(layer, layer.output, attended.flatten(1), layer.attention_out, stream)

    def _mlp(self, layer: DeviceLayer, stream: Tensor) -> None:
        x = self._normed(layer, stream, layer.mlp_in)
        inner = torch.empty(len(x), layer.down.weight.shape[1], dtype=x.dtype, device=x.device)
        self._functions.gated_linear(
            x, layer.gate_up.weight, inner, activation=layer.activation, bias=layer.gate_up.bias
        )
        self._add(layer, layer.down, inner, layer.mlp_out, stream)

    def _normed(self, layer: DeviceLayer, stream: Tensor, weight: Tensor | None) -> Tensor:
        """What the layer's products multiply."""
        x = torch.empty_like(stream, dtype=layer.qkv.weight.dtype)
        self._functions.rms_norm(stream, weight, x, eps=layer.eps)
        return x

    def _add(self, layer: DeviceLayer, product: DeviceLinear, x: Tensor, norm: Tensor | None, stream: Tensor) -> None:
        """Add a product, normed where there is a norm after it, to the residual stream."""
        scale = layer.residual_scale
        if norm is None:
            self._functions.add_linear(x, product.weight, stream, bias=product.bias, scale=scale)
        else:
            self._functions.add_normed(product.wide(x), norm, stream, eps=layer.eps, scale=scale)


def _rows_like(x: Tensor, width: int) -> Tensor:
    """Room for fp32 rows, as many as x has."""
    return torch.empty(len(x), width, dtype=torch.float32, device=x.device)
