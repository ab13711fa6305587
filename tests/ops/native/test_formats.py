"""The table of weight formats: what each row promises, and which is taken."""

from __future__ import annotations

import pytest
import torch

from forerun.errors import ConfigError
from forerun.ops.native.formats import WEIGHT_FORMATS, check_quantization, int8, lossless_format
from forerun.ops.native.library import LEVELS
from forerun.ops.native.memory import Arena
from tests.native import every_format, every_level, generator


@every_level
@every_format
def test_a_weight_takes_the_bytes_that_its_row_says(kernels, weight_format):
    weight = torch.randn(1024, 2048, generator=generator(0))
    packed = weight_format.pack(kernels, weight, None, Arena())
    assert packed.format is weight_format
    assert packed.num_bytes == pytest.approx(weight_format.bytes_per_weight * weight.numel(), rel=0.01)


@pytest.mark.parametrize("at_once", [1, 700, 1 << 20])
def test_weights_are_rounded_to_eight_bits_some_outputs_at_a_time_with_the_same_bits(monkeypatch, at_once):
    monkeypatch.setattr(int8, "ROUNDED_AT_ONCE", at_once)
    weight = torch.randn(67, 96, generator=generator(0)).bfloat16()
    weight[5] = 0
    codes, scale = int8.quantize(weight)
    wide = weight.float()
    whole = wide.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
    assert torch.equal(scale, whole)
    assert torch.equal(codes, (wide / whole[:, None]).round().to(torch.int8))


def test_a_whole_weight_is_never_in_fp32_while_it_is_rounded_to_eight_bits(monkeypatch):
    widest = []
    to_fp32 = torch.Tensor.float

    def spy(tensor):
        widest.append(tensor.numel())
        return to_fp32(tensor)

    monkeypatch.setattr(torch.Tensor, "float", spy)
    int8.quantize(torch.zeros(5, int8.ROUNDED_AT_ONCE // 2, dtype=torch.bfloat16))
    assert max(widest) <= int8.ROUNDED_AT_ONCE


def test_each_row_has_a_name_and_a_number_of_its_own():
    assert all(name == row.name for name, row in WEIGHT_FORMATS.items())
    assert len({row.kernel_id for row in WEIGHT_FORMATS.values()}) == len(WEIGHT_FORMATS)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_level_has_a_format_that_keeps_the_weights_as_they_are(level, dtype):
    taken = lossless_format(dtype, level=level)
    suitable = [
        row.bytes_per_weight
        for row in WEIGHT_FORMATS.values()
        if row.activations == dtype and not row.is_quantization and level in row.levels
    ]
    assert taken.bytes_per_weight == min(suitable)


@pytest.mark.parametrize("name", [None, "int8", "int4", "int4-symmetric"])
def test_weights_may_be_rounded_to_what_the_table_has(name):
    check_quantization(name)


@pytest.mark.parametrize("name", ["int3", "bf16", "bf16-12bit", "", 8, ["int8"]])
def test_what_is_no_quantization_is_refused_with_those_there_are(name):
    with pytest.raises(
        ConfigError,
        match=r"quantization: got .*; may be int8, int4, int4-symmetric, or None for the weights as they are",
    ):
        check_quantization(name)
