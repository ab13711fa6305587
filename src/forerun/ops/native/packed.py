"""Weights laid out for the kernels, and the operations that read them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.ops.native.coded import RareWeights, code, decode, inputs_of
from forerun.ops.native.library import Kernels
from forerun.ops.native.memory import Arena
from forerun.ops.native.structs import STORAGE, TILE, WeightStruct


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [outputs, inputs] in tiles of 32 outputs (csrc/matmul.h).

    fp32 is stored as [tiles, inputs, 32], bf16 and int8 as [tiles, inputs / 2, 32, 2], coded bf16 (coded.py) as
    [tiles, bytes]; outputs are padded with zeros to whole tiles, inputs to an even number. int8 has a scale per output.
    """

    data: Tensor
    scale: Tensor | None  # [padded outputs] fp32
    bias: Tensor | None  # [padded outputs] fp32
    outputs: int
    inputs: int
    rare: RareWeights | None = None  # of coded bf16
    struct: WeightStruct = field(init=False, repr=False)

    def __post_init__(self) -> None:
        struct = WeightStruct(
            data=self.data.data_ptr(),
            scale=None if self.scale is None else self.scale.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            outputs=len(self.data) * TILE,
            inputs=self._padded_inputs(),
            storage=STORAGE[self.data.dtype],
            rare=None if self.rare is None else self.rare.values.data_ptr(),
            first_rare=None if self.rare is None else self.rare.first.data_ptr(),
        )
        object.__setattr__(self, "struct", struct)

    @property
    def num_bytes(self) -> int:
        """Bytes that a pass reads."""
        parts = [self.data, self.scale, self.bias]
        parts += [] if self.rare is None else [self.rare.values, self.rare.first]
        return sum(part.nbytes for part in parts if part is not None)

    def _padded_inputs(self) -> int:
        if self.rare is not None:
            return inputs_of(self.data)
        return self.data.shape[1] * (1 if self.data.ndim == 3 else 2)

    def unpack(self) -> Tensor:
        """[outputs, inputs] as it was given: fp32, bf16, or what int8 stands for in fp32."""
        data = self.data if self.rare is None else decode(self.data, self.rare)
        data = data if data.ndim == 4 else data.unsqueeze(-1)
        tiles, steps, lanes, pair = data.shape
        weight = data.permute(0, 2, 1, 3).reshape(tiles * lanes, steps * pair)
        if self.scale is not None:
            weight = weight.float() * self.scale[:, None]
        return weight[: self.outputs, : self.inputs]

    def select(self, outputs: Tensor) -> PackedWeight:
        """The same for some outputs only ([n] int64), copied: a head over a part of the vocabulary. Not of coded bf16."""
        assert self.rare is None, "a tile's outputs share their code"
        padded = torch.zeros(-(-len(outputs) // TILE) * TILE, dtype=torch.int64)
        padded[: len(outputs)] = outputs
        tiles, lanes = padded // TILE, padded % TILE
        chosen = self.data[tiles, :, lanes]  # [padded, steps(, 2)]
        data = chosen.view(-1, TILE, *chosen.shape[1:]).transpose(1, 2).contiguous()
        return PackedWeight(
            data=data,
            scale=None if self.scale is None else self.scale[padded].contiguous(),
            bias=None if self.bias is None else self.bias[padded].contiguous(),
            outputs=len(outputs),
            inputs=self.inputs,
        )


def pack(weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, arena: Arena) -> PackedWeight:
    """Lay out a weight [outputs, inputs] as fp32 or bf16, or round it to int8 by output."""
    outputs, inputs = weight.shape
    num_tiles, even = -(-outputs // TILE), inputs + inputs % 2
    scale = None
    if dtype == torch.int8:
        weight, scale = quantize(weight)
    pair = 1 if dtype == torch.float32 else 2
    data = arena.empty((num_tiles, even // pair, TILE, pair), dtype)
    if (outputs, inputs) != (num_tiles * TILE, even):
        weight = torch.nn.functional.pad(weight, (0, even - inputs, 0, num_tiles * TILE - outputs))
    data.copy_(weight.view(num_tiles, TILE, even // pair, pair).permute(0, 2, 1, 3))
    return PackedWeight(
        data=data.squeeze(-1) if pair == 1 else data,
        scale=None if scale is None else _padded(scale, num_tiles * TILE, arena),
        bias=None if bias is None else _padded(bias, num_tiles * TILE, arena),
        outputs=outputs,
        inputs=inputs,
    )


def pack_coded(kernels: Kernels, weight: Tensor, bias: Tensor | None, *, arena: Arena) -> PackedWeight:
    """Lay out a weight [outputs, inputs] as bf16 in 12 bits, or as `pack` does where too many of its high bytes are rare."""
    coded = code(kernels, weight.to(torch.bfloat16).contiguous(), arena)
    if coded is None:
        return pack(weight, bias, dtype=torch.bfloat16, arena=arena)
    data, rare = coded
    outputs, inputs = weight.shape
    return PackedWeight(
        data=data,
        scale=None,
        bias=None if bias is None else _padded(bias, len(data) * TILE, arena),
        outputs=outputs,
        inputs=inputs,
        rare=rare,
    )


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each output's weights to 8 bits, symmetric about 0: int8 [outputs, inputs] and fp32 scale [outputs]."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (wide / scale[:, None]).round().to(torch.int8), scale


def _padded(values: Tensor, count: int, arena: Arena) -> Tensor:
    padded = arena.empty((count,), torch.float32)
    padded.zero_()
    padded[: len(values)] = values
    return padded


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """x @ weight.T + bias on a packed weight, the twin of `ops.linear.Linear`.

    A bf16 or int8 weight takes x rounded to bf16; sums are fp32.
    """

    kernels: Kernels
    weight: PackedWeight

    @property
    def num_bytes(self) -> int:
        """Bytes that a pass reads."""
        return self.weight.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in x's dtype."""
        return self.capped(x, factor=1.0, cap=0.0).to(x.dtype)

    def capped(self, x: Tensor, *, factor: float, cap: float) -> Tensor:
        """[..., in] -> [..., out] fp32: cap * tanh(factor * y / cap), or factor * y where cap is 0."""
        rows = x.float().contiguous()
        out = torch.empty(*x.shape[:-1], self.weight.outputs, dtype=torch.float32)
        num_rows = rows.numel() // self.weight.inputs
        self.kernels.linear(
            self.weight.struct,
            rows.data_ptr(),
            num_rows,
            self.weight.inputs,
            self.weight.outputs,
            factor,
            cap,
            out.data_ptr(),
        )
        return out

    def argmax(self, x: Tensor, *, factor: float = 1.0, cap: float = 0.0) -> Tensor:
        """[R, in] -> [R] int64: where `capped` is highest, the first of equal ones; no logits are stored."""
        rows = x.float().contiguous()
        ids = torch.empty(len(rows), dtype=torch.int64)
        weight = self.weight
        self.kernels.linear_argmax(
            weight.struct, rows.data_ptr(), len(rows), weight.inputs, weight.outputs, factor, cap, ids.data_ptr()
        )
        return ids

    def rows(self, outputs: Tensor, *, scale: float = 1.0) -> Tensor:
        """The weights of some outputs, times `scale`: [n] int64 -> [n, in] fp32"""
        outputs = outputs.to(torch.int64).contiguous()
        found = torch.empty(len(outputs), self.weight.inputs, dtype=torch.float32)
        self.kernels.read_outputs(
            self.weight.struct, outputs.data_ptr(), len(outputs), self.weight.inputs, scale, found.data_ptr()
        )
        return found

    def select(self, outputs: Tensor) -> PackedLinear:
        """The same for some outputs only."""
        weight = self.weight
        if weight.rare is None:
            return PackedLinear(self.kernels, weight.select(outputs))
        bias = None if weight.bias is None else weight.bias[outputs]
        return PackedLinear(self.kernels, pack_coded(self.kernels, self.rows(outputs), bias, arena=Arena()))


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    """Rows of a packed head, times `scale`: tied weights are in memory once. The twin of `ops.embedding.Embedding`."""

    head: PackedLinear
    scale: float = 1.0

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size] fp32"""
        return self.head.rows(token_ids, scale=self.scale)


@dataclass(frozen=True, slots=True)
class PackedHead:
    """Logits on a packed weight, the twin of `ops.linear.Head`."""

    linear: PackedLinear
    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, normed: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] fp32"""
        return self.linear.capped(normed, factor=self.scale, cap=self.soft_cap or 0.0)

    def argmax(self, normed: Tensor) -> Tensor:
        """[R, hidden_size] -> [R] int64: what greedy decoding takes."""
        return self.linear.argmax(normed, factor=self.scale, cap=self.soft_cap or 0.0)


@dataclass(frozen=True, slots=True)
class NativeRMSNorm:
    """RMSNorm of fp32 rows, the twin of `ops.norms.RMSNorm`; weight [width] fp32."""

    kernels: Kernels
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[..., width] fp32 -> the same"""
        rows = x.contiguous()
        out = torch.empty_like(rows)
        width = len(self.weight)
        self.kernels.rms_norm(
            rows.data_ptr(), self.weight.data_ptr(), self.eps, rows.numel() // width, width, out.data_ptr()
        )
        return out
