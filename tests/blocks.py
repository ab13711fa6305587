"""Random weights in block formats."""

from __future__ import annotations

import pytest
import torch

from forerun.ops.block_formats import BLOCK_FORMATS
from forerun.ops.block_weight import BlockWeight
from tests.native import generator

HALFS = {  # where a block has fp16 numbers
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}

every_block_format = pytest.mark.parametrize("name", BLOCK_FORMATS)


def random_blocks(name, outputs, inputs, seed=0):
    """Blocks of random bytes: every code, any scale, NaN and infinity among them."""
    row = BLOCK_FORMATS[name]
    shape = (outputs, inputs // row.weights * row.bytes)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(seed))
    return BlockWeight(format=name, shape=(outputs, inputs), data=data)


def tame_blocks(name, outputs, inputs, seed=0):
    """Random blocks whose scales and offsets are finite and of like size."""
    weight = random_blocks(name, outputs, inputs, seed)
    row, random = BLOCK_FORMATS[name], generator(seed)
    blocks = weight.data.view(outputs, -1, row.bytes)
    for place in HALFS.get(name, ()):
        numbers = 0.01 * torch.randn(*blocks.shape[:2], 1, generator=random)
        blocks[..., place : place + 2] = numbers.half().view(torch.uint8)
    if name == "MXFP4":
        blocks[..., 0] = 118 + (blocks[..., 0] & 3)
    if name == "GROUPS16":
        numbers = 0.01 * torch.randn(*blocks.shape[:2], 2, generator=random)
        blocks[..., :8] = numbers.view(torch.uint8)
    return weight
