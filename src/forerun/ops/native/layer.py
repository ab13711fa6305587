"""A whole decoder layer in one call of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.ops.native.attention import NativePass
from forerun.ops.native.library import Kernels
from forerun.ops.native.structs import LayerStruct
from forerun.ops.rotary import Rotation

ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2}  # `Activation` of csrc/functions.h


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLayer:
    """The twin of `models.layers.DecoderLayer`; the residual stream is fp32.

    `tensors` are those whose addresses are in `struct`.
    """

    kernels: Kernels
    index: int
    struct: LayerStruct
    tensors: tuple[object, ...]

    def __call__(self, hidden: Tensor, rotation: Rotation | None, attend: NativePass) -> Tensor:
        """[T, hidden_size] fp32 -> [T, hidden_size] fp32; `rotation` None: the layer knows no positions."""
        out = torch.empty_like(hidden)
        cache = attend.addresses[self.index]
        self.kernels.decoder_layer(
            self.struct, attend.struct, attend.turns(rotation), *cache, hidden.data_ptr(), out.data_ptr()
        )
        return out
