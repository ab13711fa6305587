"""Rounding to four bits by the kernels, the twin of `forerun.ops.block_rounding`."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.ops.block_formats import BLOCK_FORMATS
from forerun.ops.block_rounding import parts_to_round, shares_of
from forerun.ops.block_weight import BlockWeight
from forerun.ops.native.library import Kernels


def round_to_q4_1(kernels: Kernels, weight: Tensor, importance: Tensor | None = None) -> BlockWeight:
    """As `block_rounding.round_to_q4_1`, by all threads of the kernels.

    Raises:
        ModelError: a weight is no number, or too large for fp16.
    """
    outputs, inputs = weight.shape
    row = BLOCK_FORMATS["Q4_1"]
    shares = shares_of(importance, inputs)
    data = torch.empty(outputs, inputs // row.weights * row.bytes, dtype=torch.uint8)
    first = 0
    for rows in parts_to_round(weight):
        kernels.round_blocks(rows.data_ptr(), shares.data_ptr(), len(rows), inputs, data[first:].data_ptr())
        first += len(rows)
    return BlockWeight(format="Q4_1", shape=(outputs, inputs), data=data)
