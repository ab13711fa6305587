"""A decoder layer in one call against its torch twin, with every option that a family has."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import pytest
import torch

from forerun.models.decoder import TorchLayers
from forerun.models.layers import GatedMLP, SelfAttention, WideLayer, unchanged
from forerun.models.packing import Packing
from forerun.ops.attention.naive import NaiveAttention
from forerun.ops.layers import GATINGS, Linear, RMSNorm
from forerun.ops.native.attention import NativeAttention
from forerun.ops.rotary import Rotation
from tests.models.random_decoders import exact_decoder, native_decoder
from tests.models.test_families import VARIANTS
from tests.native import BF16, FP32, INT8, every_format, every_level, every_stored_dtype, generator, threads
from tests.ops.native.passes import cache_copy, filled_cache, make_batch, random_batch, source

LAYER_VARIANTS = [name for name in VARIANTS if not name.endswith(("tied", "ConditionalGeneration"))]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the norm of what a layer adds: fp32 rounds to 6e-8, and bf16 each of four buffers to 2^-9, 0.002."""

BLOCK_SIZE = 4


def rotation_of(decoder, index, positions):
    """What layer `index` rotates by."""
    ropes = [None, *dict.fromkeys(rope for rope in decoder.config.ropes if rope is not None)]
    return decoder.rotations(positions)[ropes.index(decoder.config.ropes[index])]


def in_fp64(rotation):
    return None if rotation is None else Rotation(*(part.double() for part in rotation))


def run_layer(kernels, decoder, index, batch, hidden, cache):
    """One layer of a native decoder over a pass."""
    attend = NativeAttention(kernels).begin(batch, cache)
    return decoder.layers(hidden, decoder.rotations(batch.positions), attend, index, index + 1)


@every_level
@pytest.mark.parametrize(
    ("weight_format", "variant"),
    [
        *((FP32, variant) for variant in LAYER_VARIANTS),
        *((narrow, family) for narrow in (BF16, INT8) for family in LAYER_VARIANTS if "For" in family),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_layer_agrees_with_its_twin(kernels, weight_format, variant):
    native = native_decoder(kernels, variant, weight_format=weight_format)
    exact, tolerance = exact_decoder(variant, weight_format=weight_format), TOLERANCE[weight_format.activations]
    batch, num_blocks = random_batch(source(1), [(30, 1), (9, 6), (0, 11), (280, 3)], block_size=BLOCK_SIZE)
    cache = filled_cache(native.kv_specs, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=native.dtype)
    exact_cache = cache_copy(cache, dtype=torch.float64)
    attend = NaiveAttention().begin(batch, exact_cache)
    for index, layer in enumerate(exact.layers.layers):
        hidden = torch.randn(len(batch.positions), native.hidden_size, generator=generator(index))
        rotation = in_fp64(rotation_of(native, index, batch.positions))
        expected = layer(hidden.double(), rotation, attend) - hidden
        found = run_layer(kernels, native, index, batch, hidden, cache) - hidden
        errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
        may_differ = native.config.experts is not None and weight_format is not FP32  # rows near a tie of two experts
        assert errors.quantile(0.9) < tolerance if may_differ else errors.norm() < tolerance * len(errors) ** 0.5
        stored, exact_stored = cache.layers[index].key.double(), exact_cache.layers[index].key
        assert (stored - exact_stored).norm() < tolerance * exact_stored.norm()


@every_level
@pytest.mark.parametrize("variant", ["LlamaForCausalLM", "Gemma3ForCausalLM", "SmolLM3ForCausalLM"])
def test_all_layers_in_one_call_are_the_layers_one_by_one(kernels, variant):
    decoder = native_decoder(kernels, variant, weight_format=BF16)
    batch, num_blocks = random_batch(source(1), [(30, 1), (9, 6), (0, 11)], block_size=BLOCK_SIZE)
    cache = filled_cache(decoder.kv_specs, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=decoder.dtype)
    hidden = torch.randn(len(batch.positions), decoder.hidden_size)
    attend = NativeAttention(kernels).begin(batch, cache)
    together = decoder.layers(hidden, decoder.rotations(batch.positions), attend, 0, decoder.num_layers)
    before = hidden.clone()
    for index in range(decoder.num_layers):
        hidden = run_layer(kernels, decoder, index, batch, hidden, cache)
    assert torch.equal(together, hidden)
    assert not torch.equal(before, hidden)


@every_level
def test_rows_of_any_strides_and_dtype_are_taken_whatever_dtype_new_tensors_have(kernels):
    decoder = native_decoder(kernels, "LlamaForCausalLM", weight_format=FP32)
    batch, num_blocks = random_batch(source(1), [(30, 1), (0, 11)], block_size=BLOCK_SIZE)
    cache = filled_cache(decoder.kv_specs, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=decoder.dtype)
    wide = torch.randn(12, 2 * decoder.hidden_size, dtype=torch.float64)
    expected = run_layer(kernels, decoder, 0, batch, wide[:, 1::2].float().contiguous(), cache)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        found = run_layer(kernels, decoder, 0, batch, wide[:, 1::2], cache)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, expected)
    assert found.dtype == torch.float32


@every_level
@every_format
@pytest.mark.parametrize("variant", ["LlamaForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM"])
def test_a_row_has_the_same_bits_beside_any_number_of_sequences(kernels, weight_format, variant):
    decoder = native_decoder(kernels, variant, weight_format=weight_format)
    batch, num_blocks = random_batch(source(2), [(5 + i % 40, 1) for i in range(300)], block_size=BLOCK_SIZE)
    cache = filled_cache(decoder.kv_specs, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=decoder.dtype)
    hidden = torch.randn(300, decoder.hidden_size)
    together = run_layer(kernels, decoder, 1, batch, hidden, cache)
    for count in (1, 2, 5, 8, 16):
        some = make_batch(batch.sequences[100 : 100 + count], block_size=BLOCK_SIZE)
        found = run_layer(kernels, decoder, 1, some, hidden[100 : 100 + count], cache)
        assert torch.equal(found, together[100 : 100 + count]), count


@every_level
@every_format
@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_change_no_bit(kernels, weight_format, num_threads):
    decoder = native_decoder(kernels, "Gemma3ForCausalLM", weight_format=weight_format)
    batch, num_blocks = random_batch(source(3), [(30, 1), (9, 6), (0, 40), (280, 3)], block_size=BLOCK_SIZE)
    cache = filled_cache(decoder.kv_specs, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=decoder.dtype)
    hidden = torch.randn(len(batch.positions), decoder.hidden_size)
    expected = run_layer(kernels, decoder, 0, batch, hidden, cache)
    with threads(kernels, num_threads):
        assert torch.equal(run_layer(kernels, decoder, 0, batch, hidden, cache), expected)


def wide_layer(decoder, *, starts_normed):
    """A torch layer that reads a row beside the stream, made of a decoder's sizes; random weights."""
    config, draw = decoder.config, generator(7)
    width, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads

    def linear(outputs, inputs):
        return Linear(0.2 * torch.randn(outputs, inputs, generator=draw))

    def norm():
        return RMSNorm(0.7 + 0.3 * torch.randn(width, generator=draw), config.norm_eps)

    attention = SelfAttention(
        index=0,
        qkv=linear(heads * config.head_dim, 2 * width),
        output=linear(width, config.num_heads * config.head_dim),
        qk_norm=unchanged,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        window=None,
        soft_cap=None,
    )
    inner = config.intermediate_size
    mlp = GatedMLP(gate_up=linear(2 * inner, width), down=linear(width, inner), gating=GATINGS[config.activation])
    return WideLayer(
        attention=attention,
        mlp=mlp,
        attention_in=norm(),
        attention_out=unchanged,
        mlp_in=norm(),
        mlp_out=unchanged,
        residual_scale=1.0,
        beside_in=norm(),
        starts_normed=starts_normed,
    )


@every_level
@pytest.mark.parametrize("starts_normed", [False, True])
@every_stored_dtype
def test_a_wide_layer_and_one_behind_it_agree_with_their_twins(kernels, dtype, starts_normed):
    decoder = exact_decoder("LlamaForCausalLM", weight_format=FP32)
    layers = [wide_layer(decoder, starts_normed=starts_normed), *in_fp32(decoder.layers.layers[1:2])]
    native = Packing.choose(kernels, dtype=dtype).layers(layers, decoder.config, [1, 1])
    batch, num_blocks = random_batch(source(4), [(30, 1), (9, 6), (0, 11), (280, 3)], block_size=BLOCK_SIZE)
    cache = filled_cache(decoder.kv_specs, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype)
    rows = torch.randn(len(batch.positions), 2 * decoder.hidden_size, generator=generator(8))
    given = rows.clone()
    rotations = native_decoder(kernels, "LlamaForCausalLM", weight_format=FP32).rotations(batch.positions)
    twins = TorchLayers(layers, [1, 1])
    expected = twins(rows, rotations, NaiveAttention().begin(batch, cache_copy(cache, dtype=torch.float32)), 0, 2)
    found = native(rows, rotations, NativeAttention(kernels).begin(batch, cache), 0, 2)
    assert (found - expected).norm() < TOLERANCE[dtype] * expected.norm()
    assert torch.equal(rows, given)
    with threads(kernels, 3):
        assert torch.equal(native(rows, rotations, NativeAttention(kernels).begin(batch, cache), 0, 2), found)


@every_level
def test_a_layer_behind_the_first_that_reads_rows_beside_the_stream_is_refused(kernels):
    decoder = exact_decoder("LlamaForCausalLM", weight_format=FP32)
    layers = [wide_layer(decoder, starts_normed=False) for _ in range(2)]
    native = Packing.choose(kernels, dtype=torch.float32).layers(layers, decoder.config, [0, 0])
    batch, num_blocks = random_batch(source(4), [(30, 1), (0, 11)], block_size=BLOCK_SIZE)
    cache = filled_cache(decoder.kv_specs, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32)
    rows = torch.randn(len(batch.positions), 2 * decoder.hidden_size)
    with pytest.raises(ValueError, match="only the first layer reads rows beside the residual stream"):
        native(rows, [None], NativeAttention(kernels).begin(batch, cache), 0, 2)


def in_fp32(layers):
    """The same layers with weights in fp32."""

    def narrow(x):
        if isinstance(x, torch.Tensor):
            return x.float()
        if is_dataclass(x):
            return replace(x, **{field.name: narrow(getattr(x, field.name)) for field in fields(x)})
        return x

    return [narrow(layer) for layer in layers]
