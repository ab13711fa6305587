"""Weights handed to the kernels: which models can be, what foreign models compute then, and what memory is left."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from forerun.core.batch import SequenceRows
from forerun.errors import ModelError
from forerun.kv.cache import KVCache
from forerun.models import packing as packing_module
from forerun.models.decoder import TorchLayers, build_decoder
from forerun.models.families import FAMILIES, decoder_config
from forerun.models.loader import DummyCheckpoint
from forerun.models.packing import PackedEmbeddingModule, PackedModule, Packing, can_pack, pack_modules
from forerun.models.transformers_model import wrap_model
from forerun.ops.attention.naive import NaiveAttention
from forerun.ops.block_rounding import round_to_q8_0
from forerun.ops.candidates import find_candidates
from forerun.ops.native.attention import MOST_KEY_DIM, NativeAttention
from tests.models.paged_run import PagedRun
from tests.models.random_decoders import CPU, exact_decoder, native_decoder, random_source
from tests.models.state_dict import InMemoryCheckpoint, MixedCheckpoint
from tests.models.test_transformers_model import CONFIGS, VOCAB, make_model
from tests.native import BF16, BF16_CODED, FP32, INT8, KERNELS, every_format, every_level, generator, needs_kernels
from tests.ops.native.passes import deal_blocks, make_batch, source
from tests.tiny_models import tiny_config

TOKEN_IDS = torch.randint(3, VOCAB, [20], generator=generator(1))


def best():
    return next(iter(KERNELS.values()))


def logits_of(model, kernels):
    """Logits after each of TOKEN_IDS, in three passes."""
    (blocks,), num_blocks = deal_blocks(source(0), [len(TOKEN_IDS)], block_size=4)
    cache = KVCache(model.kv_specs, num_blocks=num_blocks, block_size=4, dtype=model.dtype, device=CPU)
    logits = []
    for start, end in ((0, 12), (12, 13), (13, 20)):
        rows = SequenceRows(num_context=start, num_rows=end - start, block_ids=blocks)
        batch = make_batch([rows], block_size=4, token_ids=TOKEN_IDS[start:end])
        logits.append(model.forward(batch, NativeAttention(kernels).begin(batch, cache)).logits)
    return torch.cat(logits)


# --- the decoder's --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "packs"),
    [
        ({}, True),
        ({"hidden_size": 45}, False),
        ({"intermediate_size": 81}, False),
        ({"head_dim": 7}, False),
        ({"head_dim": MOST_KEY_DIM}, True),
        ({"head_dim": MOST_KEY_DIM + 2}, False),
    ],
)
def test_sizes_that_the_kernels_do_not_have_are_told(sizes, packs):
    config = decoder_config(tiny_config("LlamaForCausalLM"))
    assert can_pack(replace(config, **sizes)) is packs


@needs_kernels
def test_a_decoder_of_other_sizes_computes_by_torch():
    config = tiny_config("LlamaForCausalLM", intermediate_size=81)
    checkpoint = DummyCheckpoint(config, dtype=torch.float32)
    packing = Packing(best(), FP32)
    decoder = build_decoder(config, checkpoint, dtype=torch.float32, device=CPU, packing=packing)
    assert isinstance(decoder.layers, TorchLayers)
    assert not decoder.is_batch_invariant


@every_level
@pytest.mark.parametrize(
    "variant", ["LlamaForCausalLM", "LlamaForCausalLM tied", "Gemma3ForCausalLM", "Olmo2ForCausalLM"]
)
def test_coded_weights_change_no_bit_of_the_logits(kernels, variant):
    coded, plain = (
        build_decoder(
            *random_source(variant, torch.bfloat16),
            dtype=torch.bfloat16,
            device=CPU,
            packing=Packing(kernels, weight_format),
        )
        for weight_format in (BF16_CODED, BF16)
    )
    assert coded.weight_bytes < 0.9 * plain.weight_bytes
    assert torch.equal(logits_of(coded, kernels), logits_of(plain, kernels))


@every_level
def test_bf16_is_coded_where_that_is_fast(kernels):
    packing = Packing.choose(kernels, dtype=torch.bfloat16)
    expected = BF16 if kernels.level == "portable" else BF16_CODED
    assert packing.linear(torch.randn(40, 32).bfloat16()).weight.format is packing.format is expected


@every_level
@pytest.mark.parametrize("tied", [False, True])
def test_weights_in_fp16_give_the_bits_of_fp32_in_half_the_memory(kernels, tied):
    config = tiny_config("LlamaForCausalLM", vocab_size=VOCAB, tie_word_embeddings=tied)
    halves = DummyCheckpoint(config, dtype=torch.float16)
    wide = InMemoryCheckpoint({name: halves.load(name).float() for name in halves.names()})
    packing = Packing.choose(kernels, dtype=torch.float32)
    found, expected = (
        build_decoder(config, checkpoint, dtype=torch.float32, device=CPU, packing=packing)
        for checkpoint in (halves, wide)
    )
    assert torch.equal(logits_of(found, kernels), logits_of(expected, kernels))
    assert found.weight_bytes == expected.weight_bytes / 2


@needs_kernels
def test_weights_are_rounded_only_where_that_is_asked_for():
    assert Packing.choose(best(), dtype=torch.float32).format is FP32
    assert Packing.choose(best(), dtype=torch.bfloat16, quantization="int8").format is INT8


@needs_kernels
@pytest.mark.parametrize(("quantization", "stored"), [(None, None), ("int8", None), ("int4", "Q8_0")])
def test_an_embedding_that_is_not_the_head_takes_eight_bits_beside_int4_and_is_exact_beside_others(
    quantization, stored
):
    packing = Packing.choose(best(), dtype=torch.bfloat16, quantization=quantization)
    weight = torch.randn(70, 64, generator=generator(0)).bfloat16()
    found = packing.embedding(weight)
    exact = Packing.choose(best(), dtype=torch.bfloat16).format
    assert found.weight.format.name == (stored or exact.name)
    rows = found.rows(torch.arange(70))
    assert torch.equal(rows, round_to_q8_0(weight).dequantize() if stored else weight.float())


@needs_kernels
def test_matrices_in_bf16_beside_one_in_fp32_stay_as_they_are():
    config = tiny_config("LlamaForCausalLM", vocab_size=VOCAB)
    source = DummyCheckpoint(config, dtype=torch.bfloat16)
    tensors = {name: source.load(name) for name in source.names()}
    wide = "model.layers.0.mlp.down_proj.weight"
    tensors[wide] = torch.randn(source.shape(wide), generator=generator(0))
    packing = Packing(best(), BF16)
    model = build_decoder(config, MixedCheckpoint(tensors), dtype=torch.bfloat16, device=CPU, packing=packing)
    first, *others = model.layers.layers
    assert torch.equal(first.weights["down"].unpack(), tensors[wide])
    assert {layer.weights["down"].format.name for layer in others} == {"bf16"}
    assert first.weights["gate_up"].format.name == "bf16"


@needs_kernels
def test_a_packed_decoder_promises_bits():
    assert native_decoder(best(), "LlamaForCausalLM", weight_format=INT8).is_batch_invariant
    assert not exact_decoder("LlamaForCausalLM", weight_format=INT8).is_batch_invariant


@every_level
@every_format
@pytest.mark.parametrize("variant", ["LlamaForCausalLM tied", "Gemma2ForCausalLM untied", "GraniteForCausalLM tied"])
def test_candidates_are_those_of_the_logits(kernels, weight_format, variant):
    decoder = native_decoder(kernels, variant, weight_format=weight_format)
    run = PagedRun(decoder, attention=NativeAttention(kernels))
    found = run.feed(TOKEN_IDS.tolist(), logits_rows=[1, 4], num_candidates=8)
    expected = find_candidates(found.logits, 8)
    assert decoder.finds_candidates
    assert torch.equal(found.candidates.token_ids, expected.token_ids)
    assert torch.equal(found.candidates.logits, expected.logits)


@needs_kernels
@every_format
@pytest.mark.parametrize(
    "variant", [*FAMILIES, "LlamaForCausalLM tied", "Gemma2ForCausalLM untied", "GraniteForCausalLM tied"]
)
def test_logits_agree_with_the_torch_decoder(weight_format, variant):
    exact_run = PagedRun(exact_decoder(variant, weight_format=weight_format), attention=NaiveAttention())
    exact = exact_run.feed(TOKEN_IDS.tolist()).logits
    found = logits_of(native_decoder(best(), variant, weight_format=weight_format), best())
    tolerance = 1e-4 if weight_format is FP32 else 0.05  # of the norm, after three layers of random weights
    assert (found - exact).norm() < tolerance * exact.norm()


@every_level
@every_format
def test_hidden_states_between_native_layers_agree_with_the_torch_decoder(kernels, weight_format):
    names = frozenset({"hidden.0", "hidden.1", "hidden.3", "last_hidden"})
    runs = [
        PagedRun(exact_decoder("Gemma3ForCausalLM", weight_format=weight_format), attention=NaiveAttention()),
        PagedRun(
            native_decoder(kernels, "Gemma3ForCausalLM", weight_format=weight_format),
            attention=NativeAttention(kernels),
        ),
    ]
    exact, found = (run.feed(TOKEN_IDS.tolist(), features=names).features for run in runs)
    tolerance = 1e-4 if weight_format is FP32 else 0.05
    for name in names:
        assert found[name].dtype == torch.float32
        assert (found[name] - exact[name]).norm() < tolerance * exact[name].norm()


@every_level
@every_format
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_a_pass_writes_hidden_states_to_a_cache_that_keeps_them_with_the_bits_of_those_it_returns(
    kernels, weight_format, num_tokens
):
    decoder = native_decoder(kernels, "Gemma3ForCausalLM", weight_format=weight_format)
    names = ["hidden.0", "hidden.2", "hidden.3", "last_hidden"]
    ids = torch.randint(3, VOCAB, [num_tokens], generator=generator(2))
    blocks, num_blocks = deal_blocks(source(0), [num_tokens], block_size=4)
    sequences = [SequenceRows(num_context=0, num_rows=num_tokens, block_ids=blocks[0])]
    batch = replace(make_batch(sequences, block_size=4, token_ids=ids), features=frozenset(names))
    sizes = {"num_blocks": num_blocks, "block_size": 4, "dtype": decoder.dtype, "device": CPU}
    widths = dict.fromkeys(names, decoder.hidden_size)
    keeping, other = KVCache(decoder.kv_specs, **sizes, feature_widths=widths), KVCache(decoder.kv_specs, **sizes)
    attention = NativeAttention(kernels)
    with torch.inference_mode():
        kept, returned = (decoder.forward(batch, attention.begin(batch, cache)) for cache in (keeping, other))
    assert torch.equal(kept.logits, returned.logits)
    assert kept.features.keys() == {"last_hidden"}
    assert returned.features.keys() == set(names)
    keeping.keep(batch.slot_mapping, kept.features)
    for name in names:
        expected = torch.zeros_like(keeping.features[name])
        expected[batch.slot_mapping] = returned.features[name].to(decoder.dtype)
        assert torch.equal(keeping.features[name], expected)


@needs_kernels
def test_a_tied_embedding_is_read_from_the_packed_head():
    decoder = native_decoder(best(), "LlamaForCausalLM tied", weight_format=BF16)
    assert decoder._parts.embedding.head is decoder._parts.head.linear


# --- models of transformers' own code ---------------------------------------------------------------


@every_level
@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_foreign_model_gives_the_logits_of_transformers(kernels, name):
    model = make_model(CONFIGS[name])
    expected = model(input_ids=TOKEN_IDS[None], use_cache=False).logits[0]
    plugged = wrap_model(model, Packing(kernels, FP32))
    torch.testing.assert_close(logits_of(plugged, kernels), expected, atol=1e-3, rtol=1e-3)


@every_level
@pytest.mark.parametrize("weight_format", [BF16, INT8], ids=["bf16", "int8"])
def test_a_foreign_model_of_narrow_weights_stays_near(kernels, weight_format):
    config = CONFIGS["parallel_residual"]
    expected = make_model(config)(input_ids=TOKEN_IDS[None], use_cache=False).logits[0]
    plugged = wrap_model(make_model(config).to(torch.bfloat16), Packing(kernels, weight_format))
    found = logits_of(plugged, kernels)
    assert (found - expected).norm() < 0.05 * expected.norm()


@needs_kernels
def test_the_weights_that_were_packed_are_gone():
    model = make_model(CONFIGS["parallel_residual"])
    weights = [weakref.ref(module.weight) for module in model.modules() if isinstance(module, nn.Linear)]
    pack_modules(model, Packing(best(), FP32))
    gc.collect()
    assert len(weights) == 13
    assert not any(weight() is not None for weight in weights)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())


@needs_kernels
@pytest.mark.parametrize("name", ["mixture_of_experts", "experts_and_window", "learned_positions"])
def test_a_foreign_model_with_most_weights_in_no_linear_layer_is_not_rounded(name):
    model = make_model(CONFIGS[name]).bfloat16()
    with pytest.raises(
        ModelError, match=r"quantization: got 'int8', which rounds linear layers alone; \d\d% of .*leave"
    ):
        pack_modules(model, Packing(best(), INT8))


@needs_kernels
def test_that_torch_computes_most_of_a_foreign_model_is_said_once(caplog):
    packing_module._say_computed_by_torch.cache_clear()
    for name in ("learned_positions", "learned_positions", "parallel_residual"):
        pack_modules(make_model(CONFIGS[name]), Packing(best(), FP32))
    (said,) = [record.getMessage() for record in caplog.records if "in no linear layer" in record.getMessage()]
    assert said.startswith("GPT2LMHeadModel: many of its weights (weight, ...)")


@needs_kernels
def test_a_linear_layer_goes_before_the_next_is_packed(monkeypatch):
    model = make_model(CONFIGS["parallel_residual"])
    left = [weakref.ref(module) for module in model.modules() if isinstance(module, nn.Linear)]
    alive = []
    pack = Packing.linear

    def spy(packing, weight, bias=None):
        alive.append(sum(linear() is not None for linear in left))
        return pack(packing, weight, bias)

    monkeypatch.setattr(Packing, "linear", spy)
    pack_modules(model, Packing(best(), FP32))
    assert alive == list(range(len(left), 0, -1))


@needs_kernels
def test_a_linear_layer_of_several_places_is_packed_once():
    shared = nn.Linear(6, 6)
    model = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)]).requires_grad_(False)
    pack_modules(model, Packing(best(), FP32))
    assert isinstance(model[0][0], PackedModule)
    assert model[0][0] is model[1][0]


@needs_kernels
def test_a_packed_foreign_model_takes_the_bytes_of_what_was_packed():
    model = make_model(CONFIGS["parallel_residual"])
    parameters = sum(weight.nbytes for weight in model.parameters())
    linear = sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear))
    padded = wrap_model(model, Packing(best(), FP32)).weight_bytes
    assert parameters <= padded < parameters + linear


class Toy(nn.Module):
    """An embedding and a head that is tied to it."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = embedding.weight
        self.requires_grad_(False)


class Scaled(nn.Embedding):
    """Not transformers' plain kind: packing its weight would leave a second copy."""


@needs_kernels
def test_an_embedding_that_is_tied_to_a_packed_head_reads_it():
    model = Toy(nn.Embedding(10, 6))
    table, ids = model.embedding.weight.clone(), torch.tensor([[3, 9], [0, 3]])
    pack_modules(model, Packing(best(), FP32))
    assert isinstance(model.embedding, PackedEmbeddingModule)
    assert torch.equal(model.embedding(ids), table[ids])
    assert model.embedding.embedding.head is model.head.linear


@needs_kernels
def test_an_embedding_that_is_tied_to_nothing_stays():
    model = Toy(nn.Embedding(10, 6))
    model.head.weight = nn.Parameter(torch.randn(10, 6), requires_grad=False)
    pack_modules(model, Packing(best(), FP32))
    assert type(model.embedding) is nn.Embedding
    assert isinstance(model.head, PackedModule)


@needs_kernels
def test_a_head_that_is_tied_to_an_embedding_of_another_kind_stays():
    model = Toy(Scaled(10, 6))
    pack_modules(model, Packing(best(), FP32))
    assert model.head.weight is model.embedding.weight


@needs_kernels
def test_a_packed_module_still_tells_shape_and_dtype():
    model = Toy(nn.Embedding(10, 6)).bfloat16()
    pack_modules(model, Packing(best(), BF16))
    for module in (model.head, model.embedding):
        assert (module.weight.shape, module.weight.dtype) == ((10, 6), torch.bfloat16)
