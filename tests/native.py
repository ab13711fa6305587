"""The builds of the native kernels that this machine runs; tests over them are skipped where there are none."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from forerun.ops.native.library import LEVELS, kernels_of_level
from forerun.ops.native.memory import Arena
from forerun.ops.native.packed import PackedLinear, pack, pack_coded

KERNELS = {level: kernels for level in LEVELS if (kernels := kernels_of_level(level)) is not None}
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
CODED = "coded"  # bf16 in 12 bits
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8", CODED: "coded"}

every_level = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
every_format = pytest.mark.parametrize("dtype", [*DTYPES, CODED], ids=NAMES.get)
every_stored_dtype = pytest.mark.parametrize("dtype", DTYPES[:2], ids=NAMES.get)
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


def packed_linear(kernels, weight, bias=None, *, dtype):
    """A linear layer on a packed copy of `weight`; `dtype` may be CODED."""
    if dtype == CODED:
        return PackedLinear(kernels, pack_coded(kernels, weight, bias, arena=Arena()))
    return PackedLinear(kernels, pack(weight, bias, dtype=dtype, arena=Arena()))


def generator(seed):
    """Random numbers of a test's own."""
    return torch.Generator().manual_seed(seed)
