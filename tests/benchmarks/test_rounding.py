"""Rounding by groups of inputs."""

from __future__ import annotations

import torch

from benchmarks.rounding import round_by_group

WEIGHT = torch.randn(8, 10, generator=torch.Generator().manual_seed(0))


def test_an_error_is_at_most_half_a_step_of_its_own_group():
    errors = (round_by_group(WEIGHT, 4) - WEIGHT).abs()
    for error, values in zip(errors.split(4, dim=1), WEIGHT.split(4, dim=1), strict=True):
        step = values.abs().amax(dim=1, keepdim=True) / 127
        assert (error <= step / 2 * (1 + 1e-5)).all()


def test_a_group_as_wide_as_the_row_has_one_scale_per_output():
    steps = round_by_group(WEIGHT, 99) / (WEIGHT.abs().amax(dim=1, keepdim=True) / 127)
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
