"""Configurations that cannot be read from GGUF files, and what is said of them."""

import struct

import pytest
import torch

from forerun.errors import ModelError
from forerun.models.config_file import eos_token_ids, read_config
from tests.gguf_bytes import ARRAY, F32, STRING, U32, Key, Tensor, gguf_bytes

SIZES = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}
TENSORS = [Tensor("token_embd.weight", [32, 8]), Tensor("blk.0.attn_norm.weight", [32], offset=1024)]


def save(tmp_path, architecture="llama", *, tensors=TENSORS, tokens=(), more=(), without=(), **changes):
    """A file with the sizes of a tiny model; `more` keys are the architecture's."""
    values = {name: value for name, value in (SIZES | changes).items() if name not in without}
    keys = [Key(f"{architecture}.{name}", U32, value) for name, value in values.items()]
    keys.append(Key(f"{architecture}.attention.layer_norm_rms_epsilon", F32, 1e-5))
    keys += [Key(f"{architecture}.{key.name}", *key[1:]) for key in more]
    path = tmp_path / "tiny.gguf"
    path.write_bytes(
        gguf_bytes([Key("general.architecture", STRING, architecture), *keys, *tokens], tensors, data=bytes(4096))
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


@pytest.mark.parametrize(
    ("kind", "dtype"), [(0, torch.float32), (1, torch.float16), (30, torch.bfloat16), (8, torch.bfloat16)]
)
def test_the_float_type_is_that_of_the_matrices(tmp_path, kind, dtype):
    tensors = [Tensor("token_embd.weight", [32, 8], kind), *TENSORS[1:]]
    assert read_config(save(tmp_path, tensors=tensors)).dtype == dtype


def test_texts_end_with_each_token_that_is_known_to_end_them(tmp_path):
    words = Key("tokenizer.ggml.tokens", ARRAY, ["a", "<|eot_id|>", "<|im_end|>", "b", "<|endoftext|>"], STRING)
    ends = [Key("tokenizer.ggml.eos_token_id", U32, 3), Key("tokenizer.ggml.eot_token_id", U32, 2)]
    path = save(tmp_path, tokens=[words, *ends])
    assert read_config(path).eos_token_id[:2] == [3, 2]  # those that the file names come first
    assert eos_token_ids(path) == {1, 2, 3, 4}


def test_an_unknown_architecture_is_named_with_what_is_inside(tmp_path):
    said = refusal(save(tmp_path, "clip"))
    assert "GGUF: 2 tensors F32" in said
    assert "architecture 'clip' is not known; may be llama, qwen2" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_count": 2}, "has tensors of 1 layers, but must have 2"),
        ({"block_count": (1 << 32) - 1}, "must have 4294967295"),
        ({"attention.head_count": 0}, "attention.head_count: got 0"),
        ({"embedding_length": 0}, "embedding_length: got 0"),
        ({"attention.value_length": 9}, "keys and of values have different sizes"),
        ({"expert_count": 8}, "with 8 experts"),
        ({"attention.sliding_window": 64}, "sliding window"),
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


def test_sizes_by_layer_are_refused(tmp_path):
    path = save(tmp_path, without=["feed_forward_length"], more=[Key("feed_forward_length", ARRAY, [64], U32)])
    assert "feed_forward_length: got an array of 1; must be a whole number" in refusal(path)


def test_a_file_without_embeddings_is_refused(tmp_path):
    assert "tensor 'token_embd.weight' is missing" in refusal(save(tmp_path, tensors=TENSORS[1:]))


def test_more_tokens_than_embeddings_are_refused(tmp_path):
    words = Key("tokenizer.ggml.tokens", ARRAY, list("abcdefghi"), STRING)
    assert "has 9 tokens, but embeddings of only 8" in refusal(save(tmp_path, tokens=[words]))


def test_phi3_with_longrope_is_refused(tmp_path):
    tensors = [*TENSORS, Tensor("rope_factors_long.weight", [4], offset=2048)]
    assert "LongRoPE" in refusal(save(tmp_path, "phi3", tensors=tensors))


def test_granite_without_rope_is_refused(tmp_path):
    path = save(tmp_path, "granite", more=[Key("rope.scaling.finetuned", 7, False)])
    assert "no rotary embedding" in refusal(path)


@pytest.mark.parametrize("wrong", [-1.0, 0.0, float("nan"), float("inf")])
def test_rope_factors_that_are_no_positive_numbers_are_refused(tmp_path, wrong):
    tensors = [*TENSORS, Tensor("rope_freqs.weight", [4], offset=2048)]
    path = save(tmp_path, tensors=tensors)
    content = bytearray(path.read_bytes())
    start = len(content) - 4096 + 2048
    content[start : start + 16] = struct.pack("<4f", 1.0, wrong, 1.0, 1.0)
    path.write_bytes(content)
    assert "not positive" in refusal(path)
