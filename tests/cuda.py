"""What the tests of Triton kernels share: a GPU's kernels where there is a GPU, else triton's interpreter on the CPU.

triton reads TRITON_INTERPRET where a kernel is defined, its own library of kernels included: conftest.py sets it before anything
imports triton, and this module does so where there is no conftest.py.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="needs triton: pip install 'forerun[cuda]'")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _mend_interpreter():
    """What the tests need otherwise in triton's interpreter, which keeps bf16 as uint16.

    For a loop's bounds it calls int() on an array of one element, which NumPy refuses from 2.4 on. It multiplies matrices of
    bf16 as the integers that it keeps them as, and others by BLAS, where a row's sums depend on its place in the matrix;
    here they run in order, as tensor cores sum every row alike.
    """
    import numpy as np
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widened(handle):
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle.data.astype(np.float32) if handle.data.dtype == np.float16 else handle.data
        return (handle.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)

    def create_dot(self, a, b, total, *options):
        left, right, sums = widened(a), widened(b), total.data.copy()
        for k in range(left.shape[1]):
            sums += left[:, k, None] * right[None, k, :]
        return interpreter.TensorHandle(sums, total.dtype.scalar)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = create_dot


if DEVICE.type == "cpu":
    _mend_interpreter()


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def random(*shape, seed=0, dtype=torch.float32, scale=1.0):
    """The same normal values each time for a shape and seed."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return (scale * values).to(DEVICE, dtype)


def copy_of(record):
    """A record of tensors with tensors of its own."""
    return dataclasses.replace(record, **{f.name: getattr(record, f.name).clone() for f in dataclasses.fields(record)})


def assert_equal_records(found, expected):
    for field in dataclasses.fields(expected):
        assert torch.equal(getattr(found, field.name), getattr(expected, field.name)), field.name
