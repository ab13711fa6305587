"""Checkpoints of other quantizers: the values are just those that each format defines."""

import math
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ModelError
from forerun.models.checkpoint import dense
from forerun.models.quantized import quantized_layout
from forerun.models.quantized.checkpoint import QuantizedCheckpoint
from forerun.models.quantized.packed_codes import _say_larger, unpack_words, weight_of_groups
from tests.models.quantized.checkpoints import (
    awq_parts,
    compressed_parts,
    compressed_settings,
    gptq_parts,
    in_order_of_activations,
    random_groups,
    words,
)
from tests.models.state_dict import InMemoryCheckpoint

MODULE = "model.layers.0.mlp.up_proj"
SCHEME = compressed_settings()["config_groups"]


def open_module(parts, config, **others):
    tensors = {f"{MODULE}.{suffix}": tensor for suffix, tensor in parts.items()} | others
    return QuantizedCheckpoint(InMemoryCheckpoint(tensors), quantized_layout(config))


def values_of(parts, config):
    checkpoint = open_module(parts, config)
    assert checkpoint.names() == {f"{MODULE}.weight"}
    weight = checkpoint.load(f"{MODULE}.weight")
    assert checkpoint.shape(f"{MODULE}.weight") == weight.shape
    return weight.format, weight.dequantize().double().numpy()


@pytest.mark.parametrize("name", ["checkpoint_format", "format"])
@given(st.integers(0, 2**32), st.sampled_from([32, 64, 96]), st.sampled_from([1, 2]), st.sampled_from([2, 4]))
@settings(max_examples=20, deadline=None)
def test_gptq_has_its_own_values_in_both_versions(name, seed, group_size, version, bits):
    codes, zeros, scales, values = random_groups(seed, group_size=group_size, bits=bits)
    parts = gptq_parts(codes, zeros, scales, bits=bits, group_size=group_size, version=version)
    kind = "gptq" if version == 1 else "gptq_v2"
    _, found = values_of(parts, {"quant_method": "gptq", "bits": bits, name: kind})
    assert np.array_equal(found, values)


def test_gptq_has_its_own_values_where_zero_points_do_not_fill_their_words():
    codes, zeros, scales, values = random_groups(0, group_size=32, outputs=20)
    parts = gptq_parts(codes, zeros, scales, group_size=32)
    assert np.array_equal(values_of(parts, {"quant_method": "gptq", "bits": 4})[1], values)


def test_symmetric_gptq_of_eight_bits_has_its_own_values():
    codes, zeros, scales, values = random_groups(0, group_size=32, bits=8, symmetric=True)
    parts = gptq_parts(codes, zeros, scales, bits=8, group_size=32)
    assert np.array_equal(values_of(parts, {"quant_method": "gptq", "bits": 8})[1], values)


@given(st.integers(0, 2**32), st.sampled_from([32, 64, 192]))
@settings(max_examples=20, deadline=None)
def test_awq_has_its_own_values(seed, group_size):
    codes, zeros, scales, values = random_groups(seed, group_size=group_size)
    _, found = values_of(awq_parts(codes, zeros, scales), {"quant_method": "awq", "bits": 4, "version": "gemm"})
    assert np.array_equal(found, values)


@given(st.integers(0, 2**32), st.sampled_from([32, 64, 192]), st.booleans(), st.sampled_from([20, 24]))
@settings(max_examples=20, deadline=None)
def test_compressed_tensors_has_its_own_values(seed, group_size, symmetric, outputs):
    codes, zeros, scales, values = random_groups(seed, group_size=group_size, symmetric=symmetric, outputs=outputs)
    parts = compressed_parts(codes, zeros, scales, symmetric=symmetric)
    assert np.array_equal(values_of(parts, compressed_settings(symmetric=symmetric))[1], values)


def test_compressed_tensors_of_eight_bits_per_output_has_its_own_values():
    codes, zeros, scales, values = random_groups(0, group_size=192, bits=8, symmetric=True)
    config = compressed_settings(bits=8, strategy="channel")
    assert np.array_equal(values_of(compressed_parts(codes, zeros, scales, bits=8), config)[1], values)


@pytest.mark.parametrize("shape", [(32, 1), (32,)])
def test_compressed_tensors_of_plain_int8_has_its_own_values(shape):
    codes, _, scales, values = random_groups(0, group_size=192, bits=8, symmetric=True)
    stored = torch.from_numpy(scales).view(shape)
    parts = {"weight": torch.from_numpy((codes - 128).astype(np.int8)), "weight_scale": stored}
    config = compressed_settings(bits=8, strategy="channel", format="int-quantized")
    assert np.array_equal(values_of(parts, config)[1], values)


def test_symmetric_weights_take_four_bits_and_others_a_fifth():
    symmetric = random_groups(0, group_size=32, symmetric=True)[:3]
    others = random_groups(0, group_size=32)[:3]
    assert values_of(compressed_parts(*symmetric), compressed_settings())[0] == "Q4_0"
    assert values_of(awq_parts(*others), {"quant_method": "awq", "bits": 4})[0] == "Q5_0"


@pytest.mark.parametrize(
    ("scales", "stored"),
    [
        (torch.tensor([[0.0123], [0.5]], dtype=torch.bfloat16), "Q4_0"),
        (torch.tensor([[1e-9], [0.5]], dtype=torch.bfloat16), "GROUPS16"),
        (torch.tensor([[0.0123], [2.0**17]]), "GROUPS16"),
    ],
)
@pytest.mark.parametrize("order", [torch.arange(64) // 32, torch.arange(64) % 2])
def test_scales_that_fp16_does_not_hold_stay_in_fp32(scales, stored, order):
    codes = torch.arange(128).view(2, 64) % 16
    scales = torch.cat([scales, scales.flip(0)], dim=1)
    found = weight_of_groups("w", codes, torch.full((2, 2), 8), scales, order)
    assert isinstance(found, torch.Tensor) or found.format == stored
    assert torch.equal(dense(found), (codes - 8) * scales.float()[:, order])


@pytest.mark.parametrize("scale", [math.inf, math.nan])
@pytest.mark.parametrize("order", [torch.arange(64) // 32, torch.arange(64) % 2])
def test_scales_that_are_no_numbers_are_refused(scale, order):
    codes = torch.zeros(2, 64)
    with pytest.raises(ModelError, match=f"w: scale {scale} is no number; download"):
        weight_of_groups("w", codes, codes[:, :2], torch.full((2, 2), scale), order)


def test_tensors_that_are_not_quantized_stay_as_they_are():
    codes, zeros, scales, _ = random_groups(0, group_size=32)
    norm = torch.ones(4)
    bias = torch.ones(24)
    others = {"model.norm.weight": norm, f"{MODULE}.bias": bias}
    checkpoint = open_module(awq_parts(codes, zeros, scales), {"quant_method": "awq", "bits": 4}, **others)
    assert checkpoint.names() == {f"{MODULE}.weight", f"{MODULE}.bias", "model.norm.weight"}
    assert checkpoint.load("model.norm.weight") is norm
    assert checkpoint.shape(f"{MODULE}.bias") == (24,)


def test_a_missing_part_is_named():
    codes, zeros, scales, _ = random_groups(0, group_size=32)
    parts = awq_parts(codes, zeros, scales)
    del parts["scales"]
    with pytest.raises(ModelError, match=r"up_proj\.weight is quantized, but its part 'scales' is missing"):
        open_module(parts, {"quant_method": "awq", "bits": 4})


def test_zero_points_that_the_settings_promise_are_needed():
    parts = compressed_parts(*random_groups(0, group_size=32)[:3])
    with pytest.raises(ModelError, match=r"up_proj\.weight is quantized, but its part 'weight_zero_point' is missing"):
        open_module(parts, compressed_settings(symmetric=False))


GROUPS = random_groups(0, group_size=32)[:3]
MODULES = {
    "gptq": (gptq_parts(*GROUPS, group_size=32), {"quant_method": "gptq", "bits": 4}),
    "awq": (awq_parts(*GROUPS), {"quant_method": "awq", "bits": 4}),
    "packed": (
        compressed_parts(*GROUPS, symmetric=False) | {"weight_g_idx": torch.arange(192) // 32},
        compressed_settings(symmetric=False),
    ),
    "int8": (
        {"weight": torch.zeros(32, 192, dtype=torch.int8), "weight_scale": torch.ones(32, 6)},
        compressed_settings(bits=8, format="int-quantized"),
    ),
}
"""A module as each method stores it: its parts, and the settings."""

every_part = pytest.mark.parametrize(
    ("method", "suffix"), [(name, part) for name in MODULES for part in MODULES[name][0]]
)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda part: part.flatten()[0],
        lambda part: part[:0],
        lambda part: part.flatten() if part.dim() == 2 else part[None],
        lambda part: part[:-1],
    ],
    ids=["a number", "empty", "other dimensions", "shorter"],
)
@every_part
def test_a_misshapen_part_is_refused(method, suffix, spoil):
    parts, config = MODULES[method]
    with pytest.raises(ModelError, match=r"up_proj\.weight: "):
        open_module(parts | {suffix: spoil(parts[suffix])}, config).load(f"{MODULE}.weight")


@every_part
def test_a_part_of_another_dtype_is_named(method, suffix):
    parts, config = MODULES[method]
    checkpoint = open_module(parts | {suffix: parts[suffix].double()}, config)
    with pytest.raises(ModelError, match=rf"up_proj\.weight: its part '{suffix}' is of torch.float64, expected torch"):
        checkpoint.load(f"{MODULE}.weight")


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_parts_of_any_shape_and_dtype_are_read_or_refused(data):
    parts, config = MODULES[data.draw(st.sampled_from(sorted(MODULES)))]
    suffix = data.draw(st.sampled_from(sorted(parts)))
    shape = [data.draw(st.sampled_from([0, 1, 8, n - 1, n, n + 1])) for n in parts[suffix].shape]
    dtype = data.draw(st.sampled_from([parts[suffix].dtype, torch.int8, torch.int64, torch.float16, torch.bool]))
    with suppress(ModelError):
        checkpoint = open_module(parts | {suffix: torch.ones(shape, dtype=dtype)}, config)
        assert checkpoint.load(f"{MODULE}.weight").shape == checkpoint.shape(f"{MODULE}.weight")


@pytest.mark.parametrize(("method", "suffix"), [("awq", "qzeros"), ("gptq", "scales"), ("packed", "weight_zero_point")])
def test_a_part_that_does_not_fit_the_others_is_named(method, suffix):
    parts, config = MODULES[method]
    with pytest.raises(ModelError, match=rf"its part '{suffix}' has shape .*, expected \["):
        open_module(parts | {suffix: parts[suffix][:, :-1]}, config).load(f"{MODULE}.weight")


@given(st.integers(0, 2**32), st.sampled_from([32, 64, 96]), st.sampled_from([2, 4, 8]))
@settings(max_examples=20, deadline=None)
def test_gptq_in_the_order_of_activations_has_its_own_values(seed, group_size, bits):
    groups = in_order_of_activations(seed, group_size=group_size)
    drawn = random_groups(seed, group_size=group_size, bits=bits, group_of=lambda i, _: groups[i])
    codes, zeros, scales, values = drawn
    parts = gptq_parts(codes, zeros, scales, bits=bits, group_size=group_size)
    parts["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    checkpoint = open_module(parts, {"quant_method": "gptq", "bits": bits, "desc_act": True})
    found = checkpoint.load(f"{MODULE}.weight")
    assert (found.dtype, tuple(found.shape)) == (torch.float32, checkpoint.shape(f"{MODULE}.weight"))
    assert np.array_equal(found.double().numpy(), values)


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=20, deadline=None)
def test_compressed_tensors_in_the_order_of_activations_has_its_own_values(seed, symmetric):
    groups = in_order_of_activations(seed, group_size=64)
    codes, zeros, scales, values = random_groups(
        seed, group_size=64, symmetric=symmetric, group_of=lambda i, _: groups[i]
    )
    parts = compressed_parts(codes, zeros, scales, symmetric=symmetric) | {"weight_g_idx": torch.from_numpy(groups)}
    found = open_module(parts, compressed_settings(symmetric=symmetric)).load(f"{MODULE}.weight")
    assert np.array_equal(found.double().numpy(), values)


def test_groups_in_another_order_stay_in_blocks_where_blocks_are_of_one_group():
    shuffled = [3, 0, 5, 1, 2, 4]
    codes, zeros, scales, values = random_groups(0, group_size=32, group_of=lambda i, _: shuffled[i // 32])
    parts = gptq_parts(codes, zeros, scales, group_size=32)
    parts["g_idx"] = torch.tensor(shuffled).repeat_interleave(32)
    kind, found = values_of(parts, {"quant_method": "gptq", "bits": 4, "desc_act": True})
    assert kind == "Q5_0"
    assert np.array_equal(found, values)


def test_an_order_of_too_few_inputs_is_refused():
    parts = compressed_parts(*random_groups(0, group_size=32, symmetric=True)[:3])
    parts["weight_g_idx"] = torch.full((191,), -1)
    with pytest.raises(ModelError, match=r"its part 'weight_g_idx' has shape \[191\], expected \[192\]"):
        open_module(parts, compressed_settings()).load(f"{MODULE}.weight")


def test_an_order_of_minus_one_is_that_of_the_inputs():
    codes, zeros, scales, values = random_groups(0, group_size=32, symmetric=True)
    parts = compressed_parts(codes, zeros, scales) | {"weight_g_idx": torch.full((192,), -1)}
    kind, found = values_of(parts, compressed_settings())
    assert kind == "Q4_0"
    assert np.array_equal(found, values)


def test_weights_that_grow_by_their_order_are_told_of_once(caplog):
    _say_larger.cache_clear()
    codes, zeros, scales, _ = random_groups(0, group_size=32)
    parts = gptq_parts(codes, zeros, scales, group_size=32)
    parts["g_idx"] = torch.arange(192) % 6
    for _ in range(2):
        open_module(parts, {"quant_method": "gptq", "bits": 4}).load(f"{MODULE}.weight")
    assert [record.message[:60] for record in caplog.records] == [
        "weights whose groups are in the order of activations (act-or"
    ]


@pytest.mark.parametrize("groups", [torch.arange(191) // 32, torch.arange(192) // 16, torch.full((192,), -1)])
def test_groups_that_have_no_scales_are_refused(groups):
    codes, zeros, scales, _ = random_groups(0, group_size=32)
    parts = gptq_parts(codes, zeros, scales, group_size=32) | {"g_idx": groups}
    with pytest.raises(ModelError, match=r"up_proj.weight: the groups of its inputs must be 192 numbers from 0 to 5"):
        open_module(parts, {"quant_method": "gptq", "bits": 4}).load(f"{MODULE}.weight")


def test_groups_that_are_no_whole_blocks_are_refused():
    codes, zeros, scales, _ = random_groups(0, group_size=16)
    with pytest.raises(ModelError, match="192 inputs in 12 groups; a group must be a multiple of 32"):
        open_module(awq_parts(codes, zeros, scales), {"quant_method": "awq", "bits": 4}).load(f"{MODULE}.weight")


def test_eight_bits_that_are_not_symmetric_are_refused():
    codes, zeros, scales, _ = random_groups(0, group_size=32, bits=8)
    parts = gptq_parts(codes, zeros, scales, bits=8, group_size=32)
    with pytest.raises(ModelError, match="must fit in 8 bits with a sign"):
        open_module(parts, {"quant_method": "gptq", "bits": 8}).load(f"{MODULE}.weight")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "fp8"}, "got the method 'fp8'; may be awq, compressed-tensors, gptq"),
        ("bitsandbytes", "got the method 'bitsandbytes'"),
        ({"quant_method": ["gptq"]}, r"got the method \['gptq'\]"),
        ({"quant_method": "gptq", "bits": 3}, r"\(gptq\): bits: got 3; may be 2, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format: got 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"x": {}}}, "dynamic: got"),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "rotation: got 'hadamard'; may be left out"),
        ({"quant_method": "awq", "bits": 8}, "bits: got 8; may be 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: got 'gemv'; may be gemm"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "version: got 'gemv'; may be gemm"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point: got False"),
        (compressed_settings(bits=3), "weights: got 'int3'; may be int4, int8"),
        (compressed_settings(strategy="block"), "strategy: got 'block'; may be group, channel"),
        (compressed_settings(format="marlin-24"), "format: got 'marlin-24'"),
        (compressed_settings(config_groups={}), "config_groups: got"),
        (compressed_settings(config_groups=5), "config_groups: got 5"),
        (compressed_settings(config_groups=SCHEME | {"W8A16": ["x"]}), r"config_groups: got \['group_0', 'W8A16'\]"),
        (
            compressed_settings(config_groups={"group_0": {"weights": ["x"]}}),
            r"weights: got \['x'\]; may be int4, int8",
        ),
        (compressed_settings(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme: got"),
        (compressed_settings(sparsity_config={"format": "sparse-bitmask"}), "sparsity_config: got"),
    ],
)
def test_what_is_not_supported_is_named(config, message):
    with pytest.raises(ModelError, match=message):
        quantized_layout(config)


def test_what_is_said_of_the_zeros_among_dense_weights_changes_nothing():
    sparsity = {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured"}
    assert quantized_layout(compressed_settings(sparsity_config=sparsity)) == quantized_layout(compressed_settings())


@pytest.mark.parametrize("which", ["input_activations", "output_activations"])
@pytest.mark.parametrize(("activations", "said"), [({"num_bits": 8}, "8"), ("int8", "'int8'")])
def test_activations_in_few_bits_are_refused(which, activations, said):
    config = compressed_settings(bits=8, strategy="channel", format="int-quantized")
    config["config_groups"]["group_0"][which] = activations
    with pytest.raises(ModelError, match=f"{which}: got {said}"):
        quantized_layout(config)


def test_whole_numbers_of_bits_may_be_written_with_a_point():
    parts, config = MODULES["gptq"]
    assert values_of(parts, config | {"bits": 4.0})[0] == "Q5_0"


@given(st.integers(0, 2**32), st.sampled_from([2, 4, 8]))
@settings(max_examples=20, deadline=None)
def test_words_unpack_to_what_was_packed(seed, bits):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (3, 64))
    assert np.array_equal(unpack_words(words(codes, bits), bits).numpy(), codes)
