"""Whole decoder layers in one call of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.ops.native.attention import NativePass, rotation_structs
from forerun.ops.native.library import Kernels
from forerun.ops.native.structs import LayerStruct
from forerun.ops.rotary import Rotation

ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}  # `Activation` of csrc/functions.h


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """A decoder layer's packed weights; `tensors` are those whose addresses are in `struct`."""

    struct: LayerStruct
    tensors: tuple[object, ...]
    num_bytes: int  # of all matrices


class NativeLayers:
    """The twin of calling `models.layers.DecoderLayer` one by one; the residual stream is fp32."""

    def __init__(self, kernels: Kernels, layers: Sequence[NativeLayer], rotation_of: Sequence[int]) -> None:
        """`rotation_of[i]` says which of a pass's rotations layer i takes."""
        self.layers = layers
        self._kernels = kernels
        self._structs = np.array([addressof(layer.struct) for layer in layers], dtype=np.int64)
        self._rotation_of = np.array(rotation_of, dtype=np.int32)
        self._width = layers[0].struct.width
        self._places = (self._structs.ctypes.data, self._rotation_of.ctypes.data)

    def __call__(
        self, hidden: Tensor, rotations: list[Rotation | None], attend: NativePass, first: int, last: int
    ) -> Tensor:
        """Rows [T, width that layer `first` reads] -> the residual stream after layer `last` - 1, [T, hidden_size] fp32."""
        rows = hidden.float().contiguous()
        out = torch.empty(len(rows), self._width, dtype=torch.float32)
        structs, rotation_of = self._places
        keys, values = attend.addresses.arrays(first)
        self._kernels.decoder_layers(
            structs + self._structs.itemsize * first,
            last - first,
            attend.struct,
            rotation_structs(rotations),
            rotation_of + self._rotation_of.itemsize * first,
            attend.addresses.storage,
            keys,
            values,
            rows.data_ptr(),
            out.data_ptr(),
        )
        return out
