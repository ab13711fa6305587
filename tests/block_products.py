"""Linear layers on weights in blocks, and what their results are held to."""

from __future__ import annotations

import torch

from forerun.ops.native.formats import WEIGHT_FORMATS, pack_weight
from forerun.ops.native.formats.blocks import rounding_rows
from forerun.ops.native.layers import PackedLinear
from forerun.ops.native.memory import Arena

ROUNDING = 2.0**-24  # of one fp32 operation, relative
BF16 = WEIGHT_FORMATS["bf16"]


def packed(kernels, weight, bias=None, *, row_bits=0):
    """A linear layer on any weight; see `rounding_rows`."""
    found = pack_weight(kernels, BF16, weight, bias, Arena())
    return PackedLinear(kernels, rounding_rows(found, row_bits))


def assert_within_rounding(found, weight, bias, x):
    """Compare with the weight's values in fp64; `x` is what they are multiplied with, as rounded as the kernels round it.

    Of a group's inputs each is multiplied and added; then the sum is multiplied by the scale and added, and so is the
    offset's. So an output errs by at most as many roundings of the sum of absolute values, in which the offset's part counts
    by itself, since it may cancel the scale's.
    """
    x = x.double()
    exact = x @ weight.dequantize().double().T
    groups = [part.groups() for part in getattr(weight, "parts", (weight,))]
    magnitude = torch.cat(
        [
            x.abs() @ (of_part.codes.double() * of_part.scale.double().repeat_interleave(size(of_part), 1)).abs().T
            + (
                0
                if of_part.offset is None
                else x.abs() @ of_part.offset.double().repeat_interleave(size(of_part), 1).abs().T
            )
            for of_part in groups
        ],
        dim=1,
    )
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    assert ((found.double() - exact).abs() <= (3 * x.shape[-1] + 4) * ROUNDING * magnitude).all()


def size(groups):
    """Inputs of a group."""
    return groups.codes.shape[1] // groups.scale.shape[1]
