"""Layers on packed weights, the twins of those in `ops.layers`, and whole decoder layers in one call of the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import addressof
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import Candidates, CandidateTensors
from forerun.ops.layers import SWIGLU_OAI
from forerun.ops.native.attention import NativePass, rotation_structs
from forerun.ops.native.formats.base import PackedWeight, read_outputs
from forerun.ops.native.library import Kernels
from forerun.ops.native.structs import ExpertsStruct, LayerStruct
from forerun.ops.rotary import Rotation

NO_LAYERS: frozenset[int] = frozenset()
GATING_CODES = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2, SWIGLU_OAI: 3}  # `Gating` of csrc/functions.h


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """x @ weight.T + bias on a packed weight, the twin of `ops.layers.Linear`.

    x is rounded to the dtype that the weight's format takes; sums are fp32.
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
        out = torch.empty(*x.shape[:-1], self.weight.outputs, dtype=torch.float32)
        self._compute(x, factor, cap, out=out)
        return out

    def capped_with_candidates(
        self, x: Tensor, num_candidates: int, *, factor: float, cap: float
    ) -> tuple[Tensor, Candidates]:
        """What `capped` gives of [R, in], and the candidates among it, found while it is computed."""
        out = torch.empty(len(x), self.weight.outputs, dtype=torch.float32)
        return out, self._compute(x, factor, cap, out=out, num_candidates=num_candidates)

    def candidates(self, x: Tensor, num_candidates: int, *, factor: float = 1.0, cap: float = 0.0) -> Candidates:
        """[R, in] -> the candidates among what `capped` gives, which is not stored.

        Raises:
            ValueError: there are fewer outputs than `num_candidates`, or that is above MOST_CANDIDATES.
        """
        return self._compute(x, factor, cap, num_candidates=num_candidates)

    def _compute(
        self, x: Tensor, factor: float, cap: float, *, out: Tensor | None = None, num_candidates: int = 0
    ) -> Candidates:
        weight = self.weight
        rows = _rows_of(x, weight.inputs)
        num_rows = rows.numel() // weight.inputs
        found = CandidateTensors(
            torch.empty(num_rows, num_candidates, dtype=torch.int32),
            torch.empty(num_rows, num_candidates, dtype=torch.float32),
        )
        self.kernels.linear(
            *(weight.struct, rows.data_ptr(), num_rows, weight.inputs, weight.outputs, factor, cap),
            None if out is None else out.data_ptr(),
            *(num_candidates, found.token_ids.data_ptr(), found.logits.data_ptr()),
        )
        return found

    def rows(self, outputs: Tensor, *, scale: float = 1.0) -> Tensor:
        """The weights of some outputs, times `scale`: [n] int64 -> [n, in] fp32"""
        return read_outputs(self.kernels, self.weight, outputs, scale=scale)

    def select(self, outputs: Tensor) -> PackedLinear:
        """The same for some outputs only."""
        return PackedLinear(self.kernels, self.weight.format.select(self.kernels, self.weight, outputs))


def _rows_of(x: Tensor, width: int) -> Tensor:
    """x [..., width] as the kernels read it: contiguous fp32.

    Raises:
        ValueError: it is of another width.
    """
    if x.shape[-1] != width:
        raise ValueError(f"got rows of {x.shape[-1]} values; this layer takes {width}")
    return x.float().contiguous()


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    """Rows of a packed head, times `scale`: tied weights are in memory once. The twin of `ops.layers.Embedding`."""

    head: PackedLinear
    scale: float = 1.0

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size] fp32"""
        return self.head.rows(token_ids, scale=self.scale)


@dataclass(frozen=True, slots=True)
class PackedHead:
    """Logits on a packed weight, the twin of `ops.layers.Head`."""

    linear: PackedLinear
    scale: float = 1.0
    soft_cap: float | None = None

    def __call__(self, normed: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, vocab_size] fp32"""
        return self.linear.capped(normed, factor=self.scale, cap=self.soft_cap or 0.0)

    def with_candidates(self, normed: Tensor, num_candidates: int) -> tuple[Tensor, Candidates]:
        """[R, hidden_size] -> logits [R, vocab_size] fp32 and the candidates of each row, found while they are computed."""
        return self.linear.capped_with_candidates(normed, num_candidates, factor=self.scale, cap=self.soft_cap or 0.0)

    def candidates(self, normed: Tensor, num_candidates: int) -> Candidates:
        """[R, hidden_size] -> the candidates of each row; no logits are stored."""
        return self.linear.candidates(normed, num_candidates, factor=self.scale, cap=self.soft_cap or 0.0)


@dataclass(frozen=True, slots=True)
class NativeRMSNorm:
    """RMSNorm of fp32 rows, the twin of `ops.layers.RMSNorm`; weight [width] fp32."""

    kernels: Kernels
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[..., width] fp32 -> the same"""
        width = len(self.weight)
        rows = _rows_of(x, width)
        out = torch.empty_like(rows)
        self.kernels.rms_norm(
            rows.data_ptr(), self.weight.data_ptr(), self.eps, rows.numel() // width, width, out.data_ptr()
        )
        return out


class NativeExperts:
    """The twin of `models.layers.MixtureOfExperts`."""

    def __init__(
        self,
        *,
        router: PackedWeight,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        num_chosen: int,
        sums_to_one: bool,
    ) -> None:
        """`gate_up` and `down` are each expert's; a row takes `num_chosen` of them."""
        self.weights = [router, *gate_up, *down]
        self._places = [
            np.array([addressof(one.struct) for one in of_all], dtype=np.int64) for of_all in (gate_up, down)
        ]
        gate_up_places, down_places = (places.ctypes.data for places in self._places)
        self.struct = ExpertsStruct(
            router=router.struct,
            gate_up=gate_up_places,
            down=down_places,
            num_experts=len(gate_up),
            num_chosen=num_chosen,
            sums_to_one=sums_to_one,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """A decoder layer's packed weights and fp32 norms, by their names in `LayerStruct`; their addresses are in `struct`."""

    struct: LayerStruct
    weights: Mapping[str, PackedWeight]
    norms: Mapping[str, Tensor]
    experts: NativeExperts | None = None  # None: it has one MLP
    sinks: Tensor | None = None  # [num_heads] fp32, see `Attend`

    def __post_init__(self) -> None:
        """Write the addresses to `struct`, whose sizes and rules are given."""
        for name, weight in self.weights.items():
            setattr(self.struct, name, weight.struct)
        for name, norm in self.norms.items():
            setattr(self.struct, name, norm.data_ptr())
        if self.experts is not None:
            self.struct.experts = addressof(self.experts.struct)
        if self.sinks is not None:
            self.struct.attention.sinks = self.sinks.data_ptr()

    @property
    def all_weights(self) -> list[PackedWeight]:
        """All matrices, of each expert, too."""
        return [*self.weights.values(), *(self.experts.weights if self.experts is not None else ())]

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices."""
        return sum(weight.num_bytes for weight in self.all_weights)


class NativeLayers:
    """The twin of calling `models.layers.DecoderLayer` one by one; the residual stream is fp32."""

    def __init__(self, kernels: Kernels, layers: Sequence[NativeLayer], rotation_of: Sequence[int]) -> None:
        """`rotation_of[i]` says which of a pass's rotations layer i takes."""
        self.layers = layers
        self.kernels = kernels
        self.rotation_of = rotation_of
        self._structs = np.array([addressof(layer.struct) for layer in layers], dtype=np.int64)
        self._rotation_of = np.array(rotation_of, dtype=np.int32)
        self.width = layers[0].struct.width
        self._widths = [layer.struct.beside_width + layer.struct.width for layer in layers]
        self.places = (self._structs.ctypes.data, self._rotation_of.ctypes.data)  # of both arrays

    def places_from(self, first: int) -> tuple[int, int]:
        """The addresses of both arrays, of layers and of their rotations, from one layer on."""
        structs, rotation_of = self.places
        return structs + self._structs.itemsize * first, rotation_of + self._rotation_of.itemsize * first

    def __call__(
        self,
        hidden: Tensor,
        rotations: list[Rotation | None],
        attend: NativePass,
        first: int,
        last: int,
        keep: frozenset[int] = NO_LAYERS,
    ) -> Tensor:
        """Rows [T, width that layer `first` reads] -> the residual stream after layer `last` - 1, [T, hidden_size] fp32.

        The residual streams before the layers of `keep` (after the last: the number of layers) are written to the
        cache's features "hidden.N"; only a pass of all layers keeps any.
        """
        if not 0 <= first < last <= len(self.layers) or len(hidden) != attend.struct.num_rows:
            raise ValueError(
                f"got {len(hidden)} rows for layers {first} to {last}; "
                f"the pass has {attend.struct.num_rows} rows, the decoder {len(self.layers)} layers"
            )
        rows = _rows_of(hidden, self._widths[first])
        out = torch.empty(len(rows), self.width, dtype=torch.float32)
        structs, rotation_of = self.places_from(first)
        keys, values = attend.addresses.arrays(first)
        self.kernels.decoder_layers(
            structs,
            last - first,
            attend.struct,
            rotation_structs(rotations),
            rotation_of,
            attend.addresses.storage,
            keys,
            values,
            attend.addresses.kept(keep) if keep else None,
            rows.data_ptr(),
            out.data_ptr(),
        )
        return out
