"""The formats that weights are stored in for the kernels: each is a file of this folder and a row of `WEIGHT_FORMATS`."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.ops.block_weight import AnyWeight, BlockWeight, GatedWeight, JoinedWeight, join_weights
from forerun.ops.native.formats.base import PackedWeight, StoredFormat, WeightFormat
from forerun.ops.native.formats.blocks import BLOCK_TILES
from forerun.ops.native.formats.coded import BF16_CODED
from forerun.ops.native.formats.int4 import INT4, INT4_SYMMETRIC
from forerun.ops.native.formats.int8 import INT8
from forerun.ops.native.formats.joined import JOINED
from forerun.ops.native.formats.plain import BF16, EXACT_FP16, EXACT_FP32, FP16, FP32
from forerun.ops.native.library import Kernels
from forerun.ops.native.memory import Arena
from forerun.ops.native.structs import TILE

WEIGHT_FORMATS: dict[str, WeightFormat] = {
    row.name: row for row in (FP32, BF16_CODED, BF16, INT8, INT4, INT4_SYMMETRIC)
}
"""Every format by its name; of those that hold the same dtype's weights as they are, the first that suits is taken."""

OTHER_DTYPES: dict[tuple[torch.dtype, torch.dtype], WeightFormat] = {
    (row.activations, row.stored): row for row in (FP16, EXACT_FP16, EXACT_FP32)
}
"""Formats for weights of a dtype of their own, beside rows of another: by the dtypes of rows and of weights."""

STORED_FORMATS: dict[str, StoredFormat] = {
    **WEIGHT_FORMATS,
    **{row.name: row for row in OTHER_DTYPES.values()},
    **BLOCK_TILES,
    JOINED.name: JOINED,
}
"""All that packed weights are stored in, by name."""


def lossless_format(dtype: torch.dtype, *, level: str) -> WeightFormat:
    """The format for weights that stay as they are in `dtype`, which is fp32 or bf16, on a build of the kernels."""
    return next(
        row
        for row in WEIGHT_FORMATS.values()
        if row.activations == dtype and not row.is_quantization and level in row.levels
    )


def exact_format(dense_format: WeightFormat, weight: Tensor) -> WeightFormat:
    """The format for a dense weight beside those in `dense_format`: that one, unless it would change this weight."""
    activations = dense_format.activations
    other = OTHER_DTYPES.get((activations, weight.dtype))
    if other is None or dense_format.is_quantization:
        return dense_format
    is_narrower = weight.dtype.itemsize < activations.itemsize
    return other if is_narrower or not torch.equal(weight, weight.to(activations).to(weight.dtype)) else dense_format


def pack_weight(
    kernels: Kernels,
    dense_format: WeightFormat,
    weight: AnyWeight,
    bias: Tensor | None,
    arena: Arena,
    importance: Tensor | None = None,
) -> PackedWeight:
    """Store any weight for the kernels: blocks in tiles of their own format, dense weights in `dense_format` or exactly."""
    if isinstance(weight, JoinedWeight):
        weight = join_weights(weight.parts)  # those of one format are one weight
    if isinstance(weight, GatedWeight):
        return BLOCK_TILES[weight.gates.format].pack_gated(kernels, weight, bias, arena)
    if isinstance(weight, Tensor):
        return exact_format(dense_format, weight).pack(kernels, weight, bias, arena, importance)
    if isinstance(weight, BlockWeight):
        return BLOCK_TILES[weight.format].pack(kernels, weight, bias, arena)
    if any(part.shape[0] % TILE for part in weight.parts[:-1]):
        return pack_weight(kernels, dense_format, weight.in_one_format(), bias, arena)
    sizes = [part.shape[0] for part in weight.parts]
    biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
    packed = [
        pack_weight(kernels, dense_format, part, part_bias, arena)
        for part, part_bias in zip(weight.parts, biases, strict=True)
    ]
    return JOINED.join(packed)


def check_quantization(name: object, *, setting: str = "quantization") -> None:
    """Raise `ConfigError` where `name` is neither None nor a format that weights may be rounded to."""
    names = [row.name for row in WEIGHT_FORMATS.values() if row.is_quantization]
    if name is not None and name not in names:
        raise ConfigError(f"{setting}: got {name!r}; may be {', '.join(names)}, or None for the weights as they are")
