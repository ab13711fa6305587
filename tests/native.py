"""The builds of the native kernels that this machine runs; tests over them are skipped where there are none."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch

from forerun.ops.native.formats import WEIGHT_FORMATS
from forerun.ops.native.layers import PackedLinear
from forerun.ops.native.library import LEVELS, kernels_of_level
from forerun.ops.native.memory import Arena

KERNELS = {level: kernels for level in LEVELS if (kernels := kernels_of_level(level)) is not None}
FP32, BF16, BF16_CODED, INT8 = (WEIGHT_FORMATS[name] for name in ("fp32", "bf16", "bf16-12bit", "int8"))
SANITIZED = "ASAN_OPTIONS" in os.environ  # scripts/sanitize_kernels.sh sets it
EMULATED = "QEMU_LD_PREFIX" in os.environ  # scripts/test_arm.sh sets it
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}  # of activations, keys and values

every_level = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
DENSE = [FP32, BF16, BF16_CODED, INT8]
every_format = pytest.mark.parametrize(
    "weight_format", DENSE, ids=[row.name for row in DENSE]
)  # int4 is stored in blocks
every_stored_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.get)
needs_kernels = pytest.mark.skipif(not KERNELS, reason="the native kernels are not built")


@contextmanager
def threads(kernels, count):
    """Inside the block, calls are shared among `count` threads."""
    before = kernels.num_threads
    kernels.use_threads(count)
    try:
        yield
    finally:
        kernels.use_threads(before)


def packed_linear(kernels, weight, bias=None, *, weight_format):
    """A linear layer on a packed copy of `weight`."""
    return PackedLinear(kernels, weight_format.pack(kernels, weight, bias, Arena()))


def generator(seed):
    """Random numbers of a test's own."""
    return torch.Generator().manual_seed(seed)
