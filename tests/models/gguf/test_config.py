"""Configurations that cannot be read from GGUF files, and what is said of them."""

import math
import struct

import pytest
import torch

from forerun.errors import ModelError
from forerun.models.checkpoint import open_checkpoint
from forerun.models.config_file import eos_token_ids, read_config
from forerun.models.families import decoder_config
from forerun.models.gguf.config import NEUTRAL_EXPERTS
from forerun.ops.rotary import LinearScaling
from tests.gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U32, Key, Tensor, gguf_bytes

SIZES = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}
KV_HEADS = "attention.head_count_kv"
TENSORS = [Tensor("token_embd.weight", [32, 8]), Tensor("blk.0.attn_norm.weight", [32], offset=1024)]


def save(tmp_path, architecture="llama", *, tensors=TENSORS, tokens=(), more=(), without=(), num_bytes=4096, **changes):
    """A file with the sizes of a tiny model; `more` keys are the architecture's."""
    values = {name: value for name, value in (SIZES | changes).items() if name not in without}
    keys = [Key(f"{architecture}.{name}", U32, value) for name, value in values.items()]
    keys.append(Key(f"{architecture}.attention.layer_norm_rms_epsilon", F32, 1e-5))
    keys += [Key(f"{architecture}.{key.name}", *key[1:]) for key in more]
    path = tmp_path / "tiny.gguf"
    path.write_bytes(
        gguf_bytes([Key("general.architecture", STRING, architecture), *keys, *tokens], tensors, data=bytes(num_bytes))
    )
    return path


def refusal(path):
    with pytest.raises(ModelError) as found:
        read_config(path)
    return str(found.value)


def test_values_that_a_file_leaves_out_are_llama_cpps(tmp_path):
    config = read_config(save(tmp_path, without=["attention.head_count_kv"]))
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert config.tie_word_embeddings


F32_TYPE, F16_TYPE, Q8_0_TYPE, BF16_TYPE, TQ2_0_TYPE, F64_TYPE = 0, 1, 8, 30, 35, 28


@pytest.mark.parametrize(
    ("kinds", "dtype", "is_mixed"),
    [
        ([F32_TYPE], torch.float32, False),
        ([F64_TYPE], torch.float32, False),
        ([F16_TYPE], torch.float16, False),
        ([F16_TYPE, F32_TYPE], torch.float32, False),
        ([BF16_TYPE], torch.bfloat16, False),
        ([BF16_TYPE, F32_TYPE], torch.bfloat16, True),
        ([BF16_TYPE, F16_TYPE], torch.bfloat16, True),
        ([Q8_0_TYPE], torch.bfloat16, True),
        ([TQ2_0_TYPE, F32_TYPE], torch.bfloat16, True),
    ],
)
def test_the_float_type_is_that_of_the_matrices(tmp_path, kinds, dtype, is_mixed):
    names = ("token_embd.weight", "blk.0.ffn_up.weight")
    matrices = [
        Tensor(name, [256, 8], kind, offset=2048 + 16384 * i)
        for i, (name, kind) in enumerate(zip(names, kinds, strict=False))
    ]
    path = save(tmp_path, tensors=[*matrices, *TENSORS[1:]], num_bytes=1 << 16)
    assert read_config(path).dtype == dtype
    assert open_checkpoint(path).facts.is_mixed == is_mixed


def test_texts_end_with_each_token_that_is_known_to_end_them(tmp_path):
    words = Key("tokenizer.ggml.tokens", ARRAY, ["a", "<|eot_id|>", "<|im_end|>", "b", "<|endoftext|>"], STRING)
    ends = [Key("tokenizer.ggml.eos_token_id", U32, 3), Key("tokenizer.ggml.eot_token_id", U32, 2)]
    path = save(tmp_path, tokens=[words, *ends])
    assert read_config(path).eos_token_id[:2] == [3, 2]  # those that the file names come first
    assert eos_token_ids(path) == {1, 2, 3, 4}


def test_a_html_tag_ends_no_text_of_gemma(tmp_path):
    words = Key("tokenizer.ggml.tokens", ARRAY, ["<eos>", "<s>", "a", "</s>", "<end_of_turn>"], STRING)
    for architecture, ends in (("llama", {0, 3, 4}), ("gemma3", {0, 4})):
        assert eos_token_ids(save(tmp_path, architecture, tokens=[words])) == ends


def test_a_number_that_no_token_has_neither_ends_nor_fills_texts(tmp_path):
    ends = [Key("tokenizer.ggml.eos_token_id", U32, 3), Key("tokenizer.ggml.eot_token_id", U32, 8)]
    path = save(tmp_path, tokens=[*ends, Key("tokenizer.ggml.padding_token_id", U32, (1 << 32) - 1)])
    config = read_config(path)
    assert config.eos_token_id == [3]
    assert not hasattr(config, "pad_token_id")


def test_gemma3_has_windows_only_where_the_file_names_one(tmp_path):
    layers = [Tensor(f"blk.{i}.attn_norm.weight", [32], offset=1024 + 128 * i) for i in range(7)]
    sizes = {"tensors": [TENSORS[0], *layers], "block_count": 7, "attention.key_length": 8}
    for window, expected in ((None, [None] * 7), (0, [None] * 7), (16, [16] * 5 + [None, 16])):
        named = {} if window is None else {"attention.sliding_window": window}
        decoder = decoder_config(read_config(save(tmp_path, "gemma3", **sizes, **named)))
        assert list(decoder.windows) == expected
        turned = {rope.theta for rope, of_layer in zip(decoder.ropes, decoder.windows, strict=True) if of_layer is None}
        assert turned == {10_000.0}


def test_a_window_of_0_is_none(tmp_path):
    with_zero, without = (
        decoder_config(read_config(save(tmp_path, **window))) for window in ({"attention.sliding_window": 0}, {})
    )
    assert with_zero == without


def test_in_a_period_of_0_all_layers_of_gemma3_have_windows(tmp_path):
    windows = {"attention.sliding_window": 16, "attention.sliding_window_pattern": 0}
    assert set(decoder_config(read_config(save(tmp_path, "gemma3", **windows))).windows) == {16}


def test_gemma3_with_windows_by_layer_is_refused(tmp_path):
    pattern = Key("attention.sliding_window_pattern", ARRAY, [True], BOOL)
    said = refusal(save(tmp_path, "gemma3", more=[pattern], **{"attention.sliding_window": 16}))
    assert "gemma3.attention.sliding_window_pattern: got an array of 1; must be a whole number" in said


@pytest.mark.parametrize("key", NEUTRAL_EXPERTS)
def test_what_would_make_experts_others_is_named(tmp_path, key):
    path = save(tmp_path, "qwen3moe", **{"expert_count": 8, "expert_used_count": 2, key: 4})
    assert f"metadata qwen3moe.{key}: got 4; is supported with 0" in refusal(path)


def test_experts_of_an_architecture_that_has_none_are_named(tmp_path):
    assert "architecture 'qwen2' with 8 experts is not supported" in refusal(save(tmp_path, "qwen2", expert_count=8))


def test_no_experts_of_an_architecture_that_has_some_are_told_as_a_number(tmp_path):
    sizes = {"expert_count": 0, "expert_used_count": 2, "expert_feed_forward_length": 8}
    assert "got 2 of 0 for each token" in refusal(save(tmp_path, "qwen3moe", **sizes))


def test_an_unknown_architecture_is_named_with_what_is_inside(tmp_path):
    said = refusal(save(tmp_path, "clip"))
    assert "GGUF: 2 tensors F32" in said
    assert "architecture 'clip' is not known; known: gemma2, gemma3, gpt-oss, granite, granitemoe, llama, " in said
    assert said.count("gemma2") == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_count": 2}, "has tensors of 1 layers, but must have 2"),
        ({"block_count": (1 << 32) - 1}, "must have 4294967295"),
        ({"attention.head_count": 0}, "attention.head_count: got 0"),
        ({"embedding_length": 0}, "embedding_length: got 0"),
        ({"attention.value_length": 9}, "keys and of values have different sizes"),
        ({"expert_count": 8, "expert_used_count": 9}, "got 9 of 8 for each token"),
        ({"expert_count": 8, "expert_used_count": 0}, "got 0 of 8 for each token"),
        ({"expert_count": 1 << 20, "expert_used_count": 2}, "at most 1024"),
        ({"attention.sliding_window": 64}, "sliding window"),
        ({"attention.sliding_window": 64, "expert_count": 8, "expert_used_count": 2}, "sliding window"),
        ({"more": [Key("attention.causal", BOOL, False)]}, "attention.causal: got false; must be true"),
        ({"without": ["context_length"]}, "no llama.context_length"),
        ({"without": ["feed_forward_length"]}, "no llama.feed_forward_length"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, changes, said):
    assert said in refusal(save(tmp_path, **changes))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([Key("rope.scaling.type", STRING, "dynamic")], "rope scaling 'dynamic' is not supported"),
        ([Key("rope.scaling.type", STRING, "linear")], "no llama.rope.scaling.factor"),
    ],
)
def test_ropes_that_the_decoder_lacks_are_named(tmp_path, more, said):
    assert said in refusal(save(tmp_path, more=more))


YARN = [Key("rope.scaling.type", STRING, "yarn"), Key("rope.scaling.factor", F32, 4.0)]
LINEAR = [Key("rope.scaling.type", STRING, "linear"), Key("rope.scaling.factor", F32, 4.0)]
FACTORS = [*TENSORS, Tensor("rope_freqs.weight", [4], offset=2048)]


def save_factors(tmp_path, factors, **named):
    """A file with rope factors."""
    path = save(tmp_path, tensors=FACTORS, **named)
    content = bytearray(path.read_bytes())
    start = len(content) - 4096 + 2048
    content[start : start + 16] = struct.pack("<4f", *factors)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("more", "factor"),
    [
        (LINEAR, 4.0),
        ([Key("rope.scaling.factor", F32, 4.0)], 4.0),
        ([Key("rope.scale_linear", F32, 4.0)], 4.0),
        ([LINEAR[0], Key("rope.scale_linear", F32, 4.0)], 4.0),
        ([Key("rope.scaling.factor", F32, 4.0), Key("rope.scale_linear", F32, 2.0)], 4.0),
        ([LINEAR[0], Key("rope.scaling.factor", F32, 0.0)], None),
        ([Key("rope.scaling.type", STRING, "none"), Key("rope.scaling.factor", F32, 4.0)], None),
    ],
)
def test_a_factor_is_linear_unless_the_file_says_otherwise(tmp_path, more, factor):
    scaling = decoder_config(read_config(save(tmp_path, more=more))).ropes[0].scaling
    assert scaling == (None if factor is None else LinearScaling(factor))


def test_yarn_is_stretched_from_the_original_length_and_its_scores_by_the_files_factor(tmp_path):
    whole = [*YARN, Key("rope.scaling.original_context_length", U32, 32), Key("rope.scaling.attn_factor", F32, 0.5)]
    neutral = [
        Key(f"rope.scaling.{name}", F32, value)
        for name, value in {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0}.items()
    ]
    found = decoder_config(read_config(save(tmp_path, more=[*whole, *neutral]))).ropes[0].scaling
    assert (found.factor, found.original_max_len) == (4.0, 32)
    assert found.attention_factor == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))
    plain = decoder_config(read_config(save(tmp_path, more=YARN))).ropes[0].scaling
    assert plain.original_max_len == SIZES["context_length"]
    assert plain.attention_factor == pytest.approx(1 + 0.1 * math.log(4))


def test_rope_factors_and_a_linear_one_are_multiplied(tmp_path):
    found = decoder_config(read_config(save_factors(tmp_path, [1.0, 2.0, 4.0, 8.0], more=LINEAR))).ropes[0].scaling
    assert found.factors == (4.0, 8.0, 16.0, 32.0)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([*YARN, Key("rope.scaling.yarn_ext_factor", F32, 0.5)], "yarn_ext_factor: got 0.5; rope scaling 'yarn' is"),
        ([*YARN, Key("rope.scaling.yarn_attn_factor", F32, 2.0)], "yarn_attn_factor: got 2"),
        ([*YARN, Key("rope.scaling.yarn_log_multiplier", F32, 0.1)], "yarn_log_multiplier: got 0.1"),
        ([*LINEAR, Key("rope.scaling.attn_factor", F32, 1.2)], "attn_factor: got 1.2; rope scaling 'linear' is"),
        ([*LINEAR, Key("rope.scaling.yarn_ext_factor", F32, 1.0)], "yarn_ext_factor: got 1"),
        ([Key("rope.scaling.alpha", F32, 1000.0)], "alpha: got 1000"),
        ([*LINEAR[:1], Key("rope.scaling.factor", F32, -2.0)], "factor: got -2.0; must be a positive number"),
        ([*YARN, Key("rope.freq_base", F32, 1.0)], "rope_theta: got 1.0; must be above 1"),
        ([Key("rope.dimension_count", U32, 64)], "rope.dimension_count: got 64; must be pairs of the 8 dimensions"),
        ([Key("rope.dimension_count", U32, 7)], "rope.dimension_count: got 7; must be pairs"),
        ([Key("rope.dimension_count", U32, 0)], "rope.dimension_count: got 0; must be pairs"),
        ([Key("rope.dimension_count", U32, 4)], "of which 4 of 8 dimensions rotate is not supported"),
    ],
)
def test_what_a_file_says_of_its_rope_is_never_ignored(tmp_path, more, said):
    found = refusal(save(tmp_path, more=more))
    assert said in found
    assert "tiny.gguf" in found
    assert "config.json" not in found


def test_yarn_with_rope_factors_is_refused(tmp_path):
    path = save_factors(tmp_path, [1.0] * 4, more=YARN)
    assert "'yarn' together with 'rope_freqs.weight' is not supported" in refusal(path)
    assert "'yarn' together with 'rope_factors_short.weight'" in refusal(save_longrope(tmp_path, more=YARN))


def save_longrope(tmp_path, architecture="phi3", *, short=(1.0, 2.0, 3.0, 4.0), long=(5.0, 6.0, 7.0, 8.0), **named):
    """A file with LongRoPE's factors."""
    places = [("rope_factors_short.weight", 2048), ("rope_factors_long.weight", 2560)]
    tensors = [*TENSORS, *(Tensor(name, [4], offset=offset) for name, offset in places)]
    path = save(tmp_path, architecture, tensors=tensors, **named)
    content = bytearray(path.read_bytes())
    for factors, (_, offset) in zip((short, long), places, strict=True):
        start = len(content) - 4096 + offset
        content[start : start + 16] = struct.pack("<4f", *factors)
    path.write_bytes(content)
    return path


LONGROPE = [Key("rope.scaling.original_context_length", U32, 32), Key("rope.scaling.attn_factor", F32, 1.5)]


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
@pytest.mark.parametrize(
    "named",
    [
        [],
        [Key("rope.scaling.type", STRING, "longrope")],
        [Key("rope.scaling.type", STRING, "longrope"), Key("rope.scaling.factor", F32, 1.0)],
    ],
)
def test_longrope_is_read_from_its_tensors_whether_or_not_a_type_is_named(tmp_path, architecture, named):
    config = read_config(save_longrope(tmp_path, architecture, more=[*LONGROPE, *named]))
    found = decoder_config(config).ropes[0].scaling
    assert (found.short_factors, found.long_factors) == ((1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0))
    assert (found.original_max_len, found.attention_factor) == (32, 1.5)


def test_longrope_multiplies_what_it_has_no_factor_for_by_nothing(tmp_path):
    found = decoder_config(read_config(save_longrope(tmp_path))).ropes[0].scaling
    assert (found.original_max_len, found.attention_factor) == (SIZES["context_length"], 1.0)


def test_longrope_and_a_linear_factor_are_multiplied(tmp_path):
    found = decoder_config(read_config(save_longrope(tmp_path, more=LINEAR))).ropes[0].scaling
    assert (found.short_factors, found.long_factors) == ((4.0, 8.0, 12.0, 16.0), (20.0, 24.0, 28.0, 32.0))


def test_longrope_without_one_of_its_tensors_is_refused(tmp_path):
    tensors = [*TENSORS, Tensor("rope_factors_long.weight", [4], offset=2048)]
    assert "tensor 'rope_factors_short.weight' is missing" in refusal(save(tmp_path, "phi3", tensors=tensors))


def test_longrope_with_too_few_factors_is_refused(tmp_path):
    sizes = {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}
    assert "short_factor: got 4; must be one for each of 8" in refusal(save_longrope(tmp_path, **sizes))


@pytest.mark.parametrize(("head_dim", "turned"), [(8, 4), (44, 30), (90, 52)])
def test_so_many_dimensions_rotate_as_the_file_says(tmp_path, head_dim, turned):
    sizes = {"attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": turned}
    assert decoder_config(read_config(save(tmp_path, "qwen2", **sizes))).ropes[0].dim == turned


def test_metadata_that_contradict_each_other_are_named_with_what_is_inside(tmp_path):
    found = refusal(save(tmp_path, **{"attention.head_count_kv": 3}))
    assert "tiny.gguf (GGUF: 2 tensors F32): its metadata cannot be used" in found
    assert "num_key_value_heads: got 3; must divide num_attention_heads (4)" in found
    assert found.endswith("convert the original model again")


@pytest.mark.parametrize("by_layer", [[2], [2, 2, 2]])
def test_key_heads_by_layer_are_taken_where_all_have_as_many(tmp_path, by_layer):
    """As files of dense Granite 4 models have them."""
    expected = read_config(save(tmp_path))
    found = save(tmp_path, without=[KV_HEADS], more=[Key(KV_HEADS, ARRAY, by_layer, I32)])
    assert read_config(found) == expected


@pytest.mark.parametrize(("by_layer", "kind"), [([2, 4], I32), ([2.0, 2.0], F32), ([-2, -2], I32), ([], I32)])
def test_key_heads_that_differ_by_layer_are_refused(tmp_path, by_layer, kind):
    path = save(tmp_path, without=[KV_HEADS], more=[Key(KV_HEADS, ARRAY, by_layer, kind)])
    assert f"{KV_HEADS}: got an array of {len(by_layer)}; must be a whole number" in refusal(path)


def test_other_sizes_by_layer_are_refused(tmp_path):
    path = save(tmp_path, without=["feed_forward_length"], more=[Key("feed_forward_length", ARRAY, [64], U32)])
    assert "feed_forward_length: got an array of 1; must be a whole number" in refusal(path)


def test_a_file_without_embeddings_is_refused(tmp_path):
    assert "tensor 'token_embd.weight' is missing" in refusal(save(tmp_path, tensors=TENSORS[1:]))


def test_more_tokens_than_embeddings_are_refused(tmp_path):
    words = Key("tokenizer.ggml.tokens", ARRAY, list("abcdefghi"), STRING)
    assert "has 9 tokens, but embeddings of only 8" in refusal(save(tmp_path, tokens=[words]))


def test_scales_and_caps_of_0_are_none(tmp_path):
    names = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    zeros = [Key(name, F32, 0.0) for name in names]
    with_zeros, without = (decoder_config(read_config(save(tmp_path, "granite", more=more))) for more in (zeros, []))
    assert with_zeros == without
    assert without.attention_scale == pytest.approx(8**-0.5)
    capped = save(tmp_path, "gemma3", more=[Key("final_logit_softcapping", F32, 0.0)])
    assert decoder_config(read_config(capped)).logit_soft_cap is None


def test_granite_without_rope_is_refused(tmp_path):
    path = save(tmp_path, "granite", more=[Key("rope.scaling.finetuned", 7, False)])
    assert "no rotary embedding" in refusal(path)


@pytest.mark.parametrize("wrong", [-1.0, 0.0, float("nan"), float("inf")])
def test_rope_factors_that_are_no_positive_numbers_are_refused(tmp_path, wrong):
    assert "not positive" in refusal(save_factors(tmp_path, [1.0, wrong, 1.0, 1.0]))
