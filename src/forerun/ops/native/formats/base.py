"""What a format of weights is to the rest, and a weight that is stored in one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from ctypes import addressof, c_void_p, cast
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.ops.native.library import LEVELS, Kernels
from forerun.ops.native.memory import Arena
from forerun.ops.native.structs import TILE, WeightStruct


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat(ABC):
    """How packed weights lie in tiles of 32 outputs.

    kernel_id: the format's number in `Storage` or `BlockStorage` of csrc. activations: the dtype that rows are rounded to
    before they are multiplied.
    """

    name: str
    kernel_id: int
    activations: torch.dtype

    @abstractmethod
    def unpack(self, packed: PackedWeight) -> Tensor:
        """The weight [outputs, inputs] that was packed, or what it was rounded to; in torch, to compare with the kernels."""

    @abstractmethod
    def select(self, kernels: Kernels, packed: PackedWeight, outputs: Tensor) -> PackedWeight:
        """A copy of some outputs only ([n] int64): a head over a part of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat(StoredFormat):
    """A format that dense weights [outputs, inputs] are packed in; inputs are padded to an even number.

    bytes_per_weight: in memory, scales and tables aside. is_quantization: it changes the weights, so it is taken only where
    it is asked for by name; every other format holds all weights of the dtype `activations` as they are.
    levels: builds of the kernels where it is at its best; elsewhere the next format of the same dtype is taken.
    weighs_inputs: its rounding asks how much the inputs count. rounds_embedding: an embedding that is not the head is stored
    like a head; else it is stored without loss.
    """

    bytes_per_weight: float
    is_quantization: bool = False
    levels: tuple[str, ...] = LEVELS
    weighs_inputs: bool = False
    rounds_embedding: bool = False

    @abstractmethod
    def pack(
        self, kernels: Kernels, weight: Tensor, bias: Tensor | None, arena: Arena, importance: Tensor | None = None
    ) -> PackedWeight:
        """Store a weight [outputs, inputs] and its bias [outputs], in memory of the arena.

        `importance` [inputs] is how much an error in an input's weights counts, where that is known and the format asks.
        """

    @property
    def bytes_per_head_weight(self) -> float:
        """As `bytes_per_weight`, of a head."""
        return self.bytes_per_weight

    def pack_head(self, kernels: Kernels, weight: Tensor, arena: Arena) -> PackedWeight:
        """Store the weight of a head, from which a tied embedding is read, too; see `rounds_embedding` for others."""
        return self.pack(kernels, weight, None, arena)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [outputs, inputs] in the layout of its format; `struct` is what the kernels read of it.

    `row_bits`: what it is multiplied with is rounded to so many, see `rounding_rows`; 0: it stays as it is.

    It keeps the tensors alive whose addresses are in `struct`.
    """

    format: StoredFormat
    data: Tensor  # [tiles, ...]
    outputs: int
    inputs: int
    scale: Tensor | None = None  # [padded outputs] fp32
    bias: Tensor | None = None  # [padded outputs] fp32
    rare: Tensor | None = None  # see formats.coded
    first_rare: Tensor | None = None
    parts: tuple[PackedWeight, ...] = ()  # see formats.joined
    row_bits: int = 0
    struct: WeightStruct = field(init=False, repr=False)

    def __post_init__(self) -> None:
        part_structs = (c_void_p * len(self.parts))(*(addressof(part.struct) for part in self.parts))
        struct = WeightStruct(
            data=self.data.data_ptr(),
            scale=_address(self.scale),
            bias=_address(self.bias),
            outputs=len(self.data) * TILE,
            inputs=self.inputs + self.inputs % 2,
            storage=self.format.kernel_id,
            rare=_address(self.rare),
            first_rare=_address(self.first_rare),
            num_parts=len(self.parts),
            parts=cast(part_structs, c_void_p) if self.parts else None,
            row_bits=self.row_bits,
        )
        object.__setattr__(self, "struct", struct)

    @property
    def num_bytes(self) -> int:
        """Bytes that a pass reads."""
        parts = (self.data, self.scale, self.bias, self.rare, self.first_rare)
        return sum(part.nbytes for part in parts if part is not None) + sum(part.num_bytes for part in self.parts)

    def unpack(self) -> Tensor:
        """See `StoredFormat.unpack`."""
        return self.format.unpack(self)


def read_outputs(kernels: Kernels, weight: PackedWeight, outputs: Tensor, *, scale: float = 1.0) -> Tensor:
    """The weights of some outputs, times `scale`: [n] integers -> [n, inputs] fp32"""
    outputs = outputs.to(torch.int64).contiguous()
    found = torch.empty(len(outputs), weight.inputs, dtype=torch.float32)
    kernels.read_outputs(weight.struct, outputs.data_ptr(), len(outputs), weight.inputs, scale, found.data_ptr())
    return found


def padded_outputs(values: Tensor, arena: Arena) -> Tensor:
    """A value for each output [outputs] as fp32, with zeros up to whole tiles."""
    padded = arena.empty((-(-len(values) // TILE) * TILE,), torch.float32)
    padded.zero_()
    padded[: len(values)] = values
    return padded


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
