"""The formats that weights are stored in for the kernels: each is a file of this folder and a row of `WEIGHT_FORMATS`."""

from __future__ import annotations

import torch

from forerun.errors import ConfigError
from forerun.ops.native.formats.base import WeightFormat
from forerun.ops.native.formats.coded import BF16_CODED
from forerun.ops.native.formats.int8 import INT8
from forerun.ops.native.formats.plain import BF16, FP32

WEIGHT_FORMATS: dict[str, WeightFormat] = {row.name: row for row in (FP32, BF16_CODED, BF16, INT8)}
"""Every format by its name; of those that hold the same dtype's weights as they are, the first that suits is taken."""


def lossless_format(dtype: torch.dtype, *, level: str) -> WeightFormat:
    """The format for weights that stay as they are in `dtype`, which is fp32 or bf16, on a build of the kernels."""
    return next(
        row
        for row in WEIGHT_FORMATS.values()
        if row.activations == dtype and not row.is_quantization and level in row.levels
    )


def check_quantization(name: object, *, setting: str = "quantization") -> None:
    """Raise `ConfigError` where `name` is neither None nor a format that weights may be rounded to."""
    names = [row.name for row in WEIGHT_FORMATS.values() if row.is_quantization]
    if name is not None and name not in names:
        raise ConfigError(f"{setting}: got {name!r}; may be {', '.join(names)}, or None for the weights as they are")
