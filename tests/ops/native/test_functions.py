"""The elementwise kernels against their torch twins."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ops.layers import ACTIVATIONS, GATINGS, SWIGLU_OAI
from forerun.ops.native.attention import rotation_struct
from forerun.ops.native.layers import GATING_CODES
from forerun.ops.rotary import Rotation, rotate
from tests.native import every_level, generator


def native_rotate(kernels, x, rotation):
    """x [T, num_heads, head_dim] rotated."""
    out = x.clone()
    kernels.rotate(out.data_ptr(), ctypes.byref(rotation_struct(rotation)), *x.shape)
    return out


def native_gate(kernels, gates, ups, gating):
    """Gates and their ups, joined."""
    out = torch.empty_like(gates)
    code = GATING_CODES[gating]
    kernels.gate(gates.data_ptr(), ups.data_ptr(), gates.numel(), code, out.data_ptr())
    return out


@every_level
@settings(max_examples=25)
@given(
    rows=st.integers(1, 9),
    heads=st.integers(1, 5),
    half=st.integers(1, 40),
    kept=st.integers(0, 20),
    seed=st.integers(0, 2**20),
)
def test_rotation_has_the_bits_of_its_twin(kernels, rows, heads, half, kept, seed):
    random = generator(seed)
    x = torch.randn(rows, heads, 2 * half + kept, generator=random)
    angles = torch.randn(rows, 1, half, generator=random)
    rotation = Rotation(angles.cos(), angles.sin())
    assert torch.equal(native_rotate(kernels, x, rotation), rotate(x, rotation))


@every_level
@pytest.mark.parametrize("gating", GATINGS)
def test_gate_agrees_with_its_twin(kernels, gating):
    gates = torch.cat([torch.linspace(-20, 20, 1001), torch.logspace(-6, 4, 60), -torch.logspace(-6, 4, 60)])
    ups = torch.randn(len(gates), generator=generator(0))
    exact = GATINGS[gating](gates.double(), ups.double())
    # exp and tanh are within a few roundings of 2^-24; below -4 gelu's 1 + tanh or 1 + erf cancels to nearly 0.
    found = native_gate(kernels, gates, ups, gating).double()
    torch.testing.assert_close(found, exact, rtol=2e-6, atol=2e-6)


@every_level
def test_gates_and_ups_beyond_gpt_osss_limits_agree_with_their_twin(kernels):
    gates, ups = torch.meshgrid(torch.linspace(-9, 9, 37), torch.linspace(-9, 9, 37), indexing="ij")
    found = native_gate(kernels, gates.contiguous(), ups.contiguous(), SWIGLU_OAI).double()
    torch.testing.assert_close(found, GATINGS[SWIGLU_OAI](gates.double(), ups.double()), rtol=2e-6, atol=2e-6)


@every_level
@pytest.mark.parametrize("gating", GATINGS)
def test_a_gate_has_the_same_bits_at_any_place(kernels, gating):
    gates, ups = torch.randn(2, 50)
    together = native_gate(kernels, gates, ups, gating)
    alone = torch.cat([native_gate(kernels, gates[i : i + 1], ups[i : i + 1], gating) for i in range(50)])
    assert torch.equal(together, alone)


@every_level
def test_extreme_gates_give_no_nan(kernels):
    gates = torch.tensor([-1e30, -1e4, -89.0, 0.0, 89.0, 1e4])
    for activation in ACTIVATIONS:
        found = native_gate(kernels, gates, torch.ones(6), activation)
        torch.testing.assert_close(found, gates.relu(), rtol=1e-6, atol=1e-6)


@every_level
@pytest.mark.parametrize("gating", GATINGS)
def test_a_gate_or_an_up_that_is_no_number_stays_none(kernels, gating):
    nan, one = torch.full((1,), torch.nan), torch.ones(1)
    assert native_gate(kernels, nan, one, gating).isnan()
    assert native_gate(kernels, one, nan, gating).isnan()
