"""Every row of the table against transformers' own implementation, in fp32, on random weights."""

import functools
import random
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forerun.errors import ModelError
from forerun.models.checkpoint import open_checkpoint
from forerun.models.config import NotCoveredError
from forerun.models.decoder import build_decoder
from forerun.models.families import FAMILIES, decoder_config, supports
from forerun.models.loader import load_model
from forerun.ops.rotary import Rotary
from tests.models.paged_run import PagedRun
from tests.models.state_dict import read_checkpoint
from tests.tiny_models import save_tiny_model, tiny_config

TOLERANCE = 1e-4
TOKEN_IDS = random.Random(0).choices(range(3, 128), k=45)

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PART_OF_A_HEAD = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 4.0],
    "long_factor": [1.0, 3.0, 8.0, 20.0],
}

VARIANTS = {
    **{name: (name, {}) for name in FAMILIES},
    **{f"{name} tied": (name, {"tie_word_embeddings": True}) for name in FAMILIES},
    **{f"{name} untied": (name, {"tie_word_embeddings": False}) for name in FAMILIES},
    "Llama linear": ("LlamaForCausalLM", {"rope_parameters": LINEAR}),
    "Llama llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "Llama yarn": ("LlamaForCausalLM", {"rope_parameters": YARN}),
    "Llama yarn untruncated": ("LlamaForCausalLM", {"rope_parameters": {**YARN, "truncate": False}}),
    "Llama yarn mscale": ("LlamaForCausalLM", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    "Llama yarn attention_factor": ("LlamaForCausalLM", {"rope_parameters": {**YARN, "attention_factor": 1.4}}),
    "Llama yarn betas": (
        "LlamaForCausalLM",
        {"rope_parameters": {**YARN, "beta_fast": 8, "beta_slow": 2, "truncate": False}},
    ),
    "Llama biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "Llama own head_dim": ("LlamaForCausalLM", {"head_dim": 20}),
    "Llama head_dim 32": ("LlamaForCausalLM", {"head_dim": 32}),
    "Llama MHA": ("LlamaForCausalLM", {"num_key_value_heads": 6}),
    "Llama gelu": ("LlamaForCausalLM", {"hidden_act": "gelu"}),
    "Mistral without window": ("MistralForCausalLM", {"sliding_window": None}),
    "Qwen2 without window": ("Qwen2ForCausalLM", {"use_sliding_window": False}),
    "Qwen2 yarn": ("Qwen2ForCausalLM", {"rope_parameters": YARN}),
    "Mixtral without window": ("MixtralForCausalLM", {"sliding_window": None}),
    "Qwen3Moe biases, all experts' weights": (
        "Qwen3MoeForCausalLM",
        {"attention_bias": True, "norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 7},
    ),
    "Qwen3Moe with all experts": ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 7}),
    "Olmoe chosen experts' weights": ("OlmoeForCausalLM", {"norm_topk_prob": True}),
    "Qwen3 biases": ("Qwen3ForCausalLM", {"attention_bias": True}),
    "SmolLM3 without window": ("SmolLM3ForCausalLM", {"use_sliding_window": False}),
    "Gemma2 without caps": (
        "Gemma2ForCausalLM",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "Gemma3 linear in full layers": (
        "Gemma3ForCausalLM",
        {
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "Phi3 partial rotary": (
        "Phi3ForCausalLM",
        {
            "head_dim": 16,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    # of TOKEN_IDS, whose length is what the decoder is made for, transformers computes each by the same factors
    "Phi3 LongRoPE, as long as trained": (
        "Phi3ForCausalLM",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 45},
    ),
    "Phi3 LongRoPE, longer": (
        "Phi3ForCausalLM",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 44},
    ),
    "Phi3 LongRoPE of a part": (
        "Phi3ForCausalLM",
        {
            "head_dim": 16,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 32,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "Llama LongRoPE": (
        "LlamaForCausalLM",
        {"rope_parameters": {**LONGROPE, "factor": 6.0, "original_max_position_embeddings": 40}},
    ),
    "Llama LongRoPE attention_factor": (
        "LlamaForCausalLM",
        {"rope_parameters": {**LONGROPE, "attention_factor": 1.3, "original_max_position_embeddings": 64}},
    ),
    "Llama that ignores a part": ("LlamaForCausalLM", {"rope_parameters": PART_OF_A_HEAD}),
    "Gemma2 that ignores a part": ("Gemma2ForCausalLM", {"rope_parameters": PART_OF_A_HEAD}),
    "Olmo2 llama3": ("Olmo2ForCausalLM", {"rope_parameters": LLAMA3, "attention_bias": True}),
    "Granite linear": ("GraniteForCausalLM", {"rope_parameters": LINEAR, "mlp_bias": True}),
}


@functools.cache
def decoder_and_logits(variant):
    """The decoder of a variant, and transformers' logits after each of TOKEN_IDS."""
    architecture, overrides = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as name:
        folder = save_tiny_model(Path(name), architecture, **overrides)
        config = transformers.AutoConfig.from_pretrained(folder)
        decoder = build_decoder(
            config,
            read_checkpoint(folder),
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_model_len=len(TOKEN_IDS),
        )
        model_class = getattr(transformers, architecture)
        reference = model_class.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.inference_mode():
            logits = reference(torch.tensor([TOKEN_IDS])).logits[0]
    return decoder, logits


def assert_logits(result, expected):
    torch.testing.assert_close(result.logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_equals_transformers(variant):
    decoder, expected = decoder_and_logits(variant)
    assert_logits(PagedRun(decoder).feed(TOKEN_IDS), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunked_prefill_and_cached_decode_equal_transformers(variant):
    decoder, expected = decoder_and_logits(variant)
    run = PagedRun(decoder)
    start = 0
    for size in (19, 11, 5, 1, 1, 4, 1, 1, 1, 1):
        assert_logits(run.feed(TOKEN_IDS[start : start + size]), expected[start : start + size])
        start += size
    assert start == len(TOKEN_IDS)


@pytest.mark.parametrize("rope", [YARN, LLAMA3])
def test_a_length_before_stretching_that_stands_beside_the_rope_comes_before_the_ropes_own(rope):
    config = tiny_config("LlamaForCausalLM", rope_parameters=dict(rope), original_max_position_embeddings=32)
    (own,) = set(decoder_config(config).ropes)
    positions = torch.arange(100)
    found = Rotary(own, dtype=torch.float32, device=torch.device("cpu")).rotation(positions)
    expected, _ = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    torch.testing.assert_close(found.cos[:, 0], expected[0, :, : own.dim // 2])


def test_windows_by_layer_in_a_file_of_mistral_are_ministrals(tmp_path):
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    folder = save_tiny_model(tmp_path, "MistralForCausalLM", layer_types=types)
    decoder = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(reference) is transformers.MinistralForCausalLM
    with torch.inference_mode():
        assert_logits(PagedRun(decoder).feed(TOKEN_IDS), reference(torch.tensor([TOKEN_IDS])).logits[0])


@pytest.mark.parametrize("architecture", FAMILIES)
def test_tree_equals_each_path_alone(architecture):
    decoder, _ = decoder_and_logits(architecture)
    # A committed token, then nodes with these parents; two branches, one of them forked again.
    parents = [-1, 0, 0, 1, 2, 4, 4, 6]
    tree_ids = [TOKEN_IDS[20], *range(40, 47)]
    mask = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    run = PagedRun(decoder)
    run.feed(TOKEN_IDS[:20])
    in_tree = run.try_tree(tree_ids, mask).logits
    for leaf in (3, 5, 7):
        path = mask[leaf].nonzero().flatten().tolist()
        alone = PagedRun(decoder)
        alone.feed(TOKEN_IDS[:20])
        assert_logits(alone.feed([tree_ids[node] for node in path]), in_tree[path])


@pytest.mark.parametrize("architecture", FAMILIES)
def test_table_supports_its_architectures(architecture):
    assert supports(tiny_config(architecture))


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("LlamaForCausalLM", {"hidden_act": "relu"}),
        ("Gemma2ForCausalLM", {"hidden_activation": "relu"}),
    ],
)
def test_what_a_row_has_no_code_for_is_left_to_transformers(architecture, overrides):
    config = tiny_config(architecture, **overrides)
    assert not supports(config)
    with pytest.raises(NotCoveredError, match="may be"):
        decoder_config(config)


def test_architecture_without_a_row_is_left_to_transformers():
    assert not supports(transformers.GPT2Config(architectures=["GPT2LMHeadModel"]))


def test_config_without_architecture_is_left_to_transformers():
    config = tiny_config("LlamaForCausalLM")
    config.architectures = None
    assert not supports(config)


def test_a_quantized_checkpoint_is_left_to_nobody_else():
    config = tiny_config("LlamaForCausalLM")
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert supports(config)
    config.architectures = ["GPT2LMHeadModel"]
    with pytest.raises(ModelError, match=r"quantized weights are read for forerun's own decoder alone.*GPT2"):
        supports(config)


@pytest.mark.parametrize(
    ("architecture", "says_so"),
    [
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}),
        ("Qwen2ForCausalLM", {"is_causal": False}),
    ],
)
def test_bidirectional_model_is_refused(architecture, says_so):
    with pytest.raises(ModelError, match="left to right"):
        supports(tiny_config(architecture, **says_so))


def test_sliding_layers_without_a_window_are_refused():
    config = tiny_config("Gemma2ForCausalLM", sliding_window=None)
    with pytest.raises(ModelError, match="sliding_window"):
        supports(config)


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"])
def test_experts_that_a_file_has_as_transformers_does_compute_the_same(architecture, tmp_path):
    folder = save_tiny_model(tmp_path, architecture)
    expected = PagedRun(load_model(folder, dtype=torch.float32, device=torch.device("cpu"))).feed(TOKEN_IDS).logits
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in open_checkpoint(tmp_path / "stacked").names()
    found = (
        PagedRun(load_model(tmp_path / "stacked", dtype=torch.float32, device=torch.device("cpu")))
        .feed(TOKEN_IDS)
        .logits
    )
    assert torch.equal(found, expected)
