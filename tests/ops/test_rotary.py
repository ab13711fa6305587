"""Rotary embedding by its defining properties; its values are held to transformers in the family tests."""

import math

import pytest
import torch

from forerun.ops.rotary import (
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    Rotary,
    RotaryTable,
    YarnScaling,
    rotate,
    yarn_attention_factor,
)


def rotary(dim=8, scaling=None, dtype=torch.float64):
    config = RopeConfig(dim=dim, theta=100.0, scaling=scaling)
    return Rotary(config, dtype=dtype, device=torch.device("cpu"))


def rotated(x, position, rope=None):
    return rotate(x, (rope or rotary()).rotation(torch.tensor([position])))


def test_position_zero_leaves_heads_as_they_are():
    x = torch.randn(1, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(rotated(x, 0), x)


def test_scores_depend_on_distance_alone():
    query, key = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    near = (rotated(query, 7) * rotated(key, 4)).sum()
    far = (rotated(query, 107) * rotated(key, 104)).sum()
    torch.testing.assert_close(near, far, atol=1e-4, rtol=0)


def test_pair_turns_by_its_angle():
    x = torch.zeros(1, 1, 8, dtype=torch.float64)
    x[..., 1] = 1.0  # pairs with dimension 5; angle = position * 100 ** (-2 / 8)
    angle = 3 * 100.0 ** (-2 / 8)
    result = rotated(x, 3)[0, 0]
    assert result[1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert result[5].item() == pytest.approx(math.sin(angle), abs=1e-6)


def test_dimensions_beyond_a_partial_rope_stay():
    x = torch.randn(1, 2, 12, dtype=torch.float64)
    result = rotated(x, 5)
    assert torch.equal(result[..., 8:], x[..., 8:])
    torch.testing.assert_close(result[..., :8], rotated(x[..., :8], 5))


def test_linear_scaling_stretches_positions():
    x = torch.randn(1, 1, 8, dtype=torch.float64)
    stretched = rotated(x, 12, rotary(scaling=LinearScaling(4.0)))
    torch.testing.assert_close(stretched, rotated(x, 3), atol=1e-6, rtol=0)


def test_llama3_keeps_short_wavelengths_and_divides_long_ones():
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=100)
    turns = torch.tensor([50.0, 4.0, 2.5, 1.0, 0.1])  # in the pretrained context
    inv_freq = turns * 2 * math.pi / 100
    expected = torch.tensor([1.0, 1.0, 0.5 + 0.5 / 8, 1 / 8, 1 / 8])
    torch.testing.assert_close(scaling.stretch(inv_freq) / inv_freq, expected)


def test_yarn_keeps_fast_dimensions_and_divides_slow_ones():
    scaling = YarnScaling(factor=4.0, original_max_len=1000, theta=10000.0, attention_factor=1.0)
    inv_freq = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    kept = scaling.stretch(inv_freq) / inv_freq
    assert kept[0] == 1
    assert kept[-1] == 0.25
    assert (kept.diff() <= 0).all()


def test_yarn_attention_factor_is_that_of_the_paper():
    assert yarn_attention_factor(4.0) == pytest.approx(0.1 * math.log(4.0) + 1)
    assert yarn_attention_factor(0.5) == 1.0


def test_angles_of_far_positions_are_exact_in_bf16_models():
    low = rotary(dtype=torch.bfloat16).rotation(torch.tensor([30001]))
    high = rotary().rotation(torch.tensor([30001]))
    torch.testing.assert_close(low.cos.double(), high.cos, atol=4e-3, rtol=0)


def test_table_gives_the_rotations_of_its_rotary():
    positions = torch.tensor([0, 5, 5, 1023, 1024, 5000])
    found, expected = RotaryTable(rotary()).rotation(positions), rotary().rotation(positions)
    torch.testing.assert_close(found.cos, expected.cos)
    torch.testing.assert_close(found.sin, expected.sin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_position_has_the_same_bits_whatever_is_asked_for_with_it_or_was_before(dtype):
    every = RotaryTable(rotary(dtype=dtype)).rotation(torch.arange(2100))
    grown = RotaryTable(rotary(dtype=dtype))
    for positions in ([0], [7, 3], [1030], list(range(1000, 1050)), [2099, 0]):
        found = grown.rotation(torch.tensor(positions))
        assert torch.equal(found.cos, every.cos[positions])
        assert torch.equal(found.sin, every.sin[positions])


class Interrupted:
    """A rotary during whose first call another thread, as it were, asks the same table for later positions."""

    def __init__(self, inner):
        self._inner = inner
        self._is_first = True
        self.table = RotaryTable(self)

    def rotation(self, positions):
        if self._is_first:
            self._is_first = False
            self.table.rotation(torch.tensor([1500]))
        return self._inner.rotation(positions)


def test_a_table_that_another_thread_lets_grow_meanwhile_keeps_every_position_in_its_place():
    table, positions = Interrupted(rotary()).table, torch.tensor([0, 1023, 1024, 2047])
    table.rotation(torch.tensor([0]))
    found, expected = table.rotation(positions), rotary().rotation(positions)
    torch.testing.assert_close(found.cos, expected.cos)
    torch.testing.assert_close(found.sin, expected.sin)


def test_table_takes_no_positions_at_all():
    assert RotaryTable(rotary()).rotation(torch.zeros(0, dtype=torch.int64)).cos.shape == (0, 1, 4)
