"""What is refused in a model's configuration."""

import math

import pytest

from forerun.errors import ModelError
from forerun.models.config import SIZES, NotCoveredError
from forerun.models.families import decoder_config
from forerun.models.mtp_layout import COUNT_KEYS
from tests.tiny_models import tiny_config


@pytest.mark.parametrize("factor", ["4", -1.0, 0])
def test_impossible_rope_factor_is_named(factor):
    config = tiny_config("LlamaForCausalLM")
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": factor}
    with pytest.raises(ModelError, match=f"factor: got {factor!r}"):
        decoder_config(config)


def test_a_base_that_yarn_cannot_stretch_is_named():
    config = tiny_config("LlamaForCausalLM")
    config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1.0, "factor": 4.0}
    with pytest.raises(ModelError, match=r"rope_theta: got 1.0; must be above 1"):
        decoder_config(config)


@pytest.mark.parametrize("rope_type", ["yarn", "llama3"])
@pytest.mark.parametrize("length", [-4096, "4096", math.inf])
def test_a_context_before_stretching_that_is_no_length_is_named(rope_type, length):
    config = tiny_config("LlamaForCausalLM")
    factors = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "original_max_position_embeddings": length}
    config.rope_parameters = rope | factors
    with pytest.raises(ModelError, match=f"original_max_position_embeddings: got {length!r}; must be a positive"):
        decoder_config(config)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def longrope_config(**changes):
    """A model that was trained on 64 tokens, and may have 512."""
    config = tiny_config("LlamaForCausalLM")
    config.rope_parameters = LONGROPE | {"original_max_position_embeddings": 64} | changes
    return config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"short_factor": [1.0] * 3}, "short_factor: got 3; must be one for each of 4"),
        ({"long_factor": [1.0] * 8}, "long_factor: got 8; must be one for each of 4"),
        ({"long_factor": None}, "long_factor: got None; must be a list"),
        ({"long_factor": [1.0, 2.0, 0, 4.0]}, "long_factor: got 0; must be a positive number"),
        ({"short_factor": [1.0, "2", 3.0, 4.0]}, "short_factor: got '2'; must be a positive number"),
        ({"attention_factor": -1.0}, "attention_factor: got -1.0"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings: got 1; must be above 1"),
    ],
)
def test_what_longrope_cannot_use_is_named(changes, said):
    with pytest.raises(ModelError, match=f"rope_parameters: {said}"):
        decoder_config(longrope_config(**changes))


@pytest.mark.parametrize(
    ("asked", "max_model_len", "is_long"), [(None, 64, False), (16, 64, False), (64, 64, False), (65, 512, True)]
)
def test_longrope_has_its_long_factors_where_texts_longer_than_trained_on_are_asked_for(asked, max_model_len, is_long):
    config = decoder_config(longrope_config(), max_model_len=asked)
    assert config.max_model_len == max_model_len
    assert {rope.scaling.is_long for rope in config.ropes} == {is_long}


@pytest.mark.parametrize("asked", [None, 16, 10_000])
def test_other_ropes_are_the_same_whatever_length_is_asked_for(asked):
    config = tiny_config("LlamaForCausalLM")
    assert decoder_config(config, max_model_len=asked) == decoder_config(config)


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM"])
@pytest.mark.parametrize("window", [-5, 0])
def test_a_window_of_no_tokens_is_named(architecture, window):
    config = tiny_config(architecture)
    config.sliding_window = window
    with pytest.raises(ModelError, match=f"sliding_window: got {window}; must be 1 or more"):
        decoder_config(config)


@pytest.mark.parametrize("factor", [0.45, 0.01, 2.0, math.inf])
def test_a_part_of_a_head_that_is_no_pairs_is_named(factor):
    config = tiny_config("Phi3ForCausalLM", head_dim=16)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}
    with pytest.raises(ModelError, match=f"partial_rotary_factor: got {factor!r}"):
        decoder_config(config)


def test_heads_that_cannot_share_keys_are_refused():
    with pytest.raises(ModelError, match="num_key_value_heads: got 4"):
        decoder_config(tiny_config("LlamaForCausalLM", num_key_value_heads=4))


def test_each_layer_needs_a_type():
    config = tiny_config("Gemma2ForCausalLM")
    config.layer_types = ["full_attention"]
    with pytest.raises(ModelError, match="layer_types: got 1"):
        decoder_config(config)


def test_layers_that_rotate_must_all_be_told():
    config = tiny_config("SmolLM3ForCausalLM")
    config.no_rope_layers = [1]
    with pytest.raises(ModelError, match="no_rope_layers: got 1"):
        decoder_config(config)


@pytest.mark.parametrize("name", [*SIZES, "head_dim"])
def test_sizes_below_one_are_refused(name):
    config = tiny_config("LlamaForCausalLM")
    setattr(config, name, 0)
    with pytest.raises(ModelError, match=f"{name}: got 0; must be 1 or more"):
        decoder_config(config)


def test_an_architecture_of_another_model_type_is_refused():
    config = tiny_config("LlamaForCausalLM")
    config.architectures = ["MistralForCausalLM"]
    with pytest.raises(ModelError, match=r"'MistralForCausalLM' of model_type 'llama'.*sliding_window"):
        decoder_config(config)


def test_a_value_that_cannot_be_computed_with_is_refused():
    config = tiny_config("Gemma2ForCausalLM", query_pre_attn_scalar=0)
    with pytest.raises(ModelError, match="'Gemma2ForCausalLM' of model_type 'gemma2': cannot be used"):
        decoder_config(config)


@pytest.mark.parametrize("count", ["one", [1], -1, True, 10**10])
@pytest.mark.parametrize("key", COUNT_KEYS)
def test_a_number_of_mtp_layers_that_is_none_is_refused(key, count):
    config = tiny_config("LlamaForCausalLM")
    setattr(config, key, count)
    with pytest.raises(ModelError, match=f"{key}: got .*; must be a whole number"):
        decoder_config(config)


@pytest.mark.parametrize(("factor", "longest"), [(4.0, 2048), (None, 512), (0.5, 512)])
def test_yarn_that_is_added_to_a_file_makes_texts_longer(factor, longest):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": factor, "original_max_position_embeddings": 512}
    config = tiny_config("Qwen2ForCausalLM", max_position_embeddings=512)
    config.rope_parameters = rope
    assert decoder_config(config).max_model_len == longest


def test_a_type_of_layers_without_a_rope_is_named():
    config = tiny_config("Gemma3ForCausalLM")
    config.layer_types = ["chunked_attention", "full_attention", "full_attention"]
    with pytest.raises(NotCoveredError, match="rope_parameters: got none for layers of type 'chunked_attention'"):
        decoder_config(config)


def test_ropes_by_type_are_refused_where_layers_have_no_types():
    config = tiny_config("LlamaForCausalLM")
    config.rope_parameters = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ModelError, match=r"cannot be used.*layer_types"):
        decoder_config(config)


def test_layers_that_differ_from_each_other_are_refused():
    config = tiny_config("LlamaForCausalLM", per_layer_config={"1": {"intermediate_size": 96}})
    with pytest.raises(ModelError, match="per_layer_config: got layers that differ"):
        decoder_config(config)
