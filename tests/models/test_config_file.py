"""Our reading of config.json gives what transformers' gives, for each architecture that it covers."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.errors import ModelError
from forerun.models.completed_config import TYPES, ConfigStandIn, config_without_transformers
from forerun.models.config_file import MASK_KEYS, read_config, read_transformers_config
from forerun.models.families import MODEL_TYPES, decoder_config
from forerun.models.mtp_layout import COUNT_KEYS
from tests.tiny_models import tiny_config

COVERED = {model_type: family for model_type, family in MODEL_TYPES.items() if family.config}
READ_OUTSIDE_THE_DECODER = ("architectures", "model_type", "dtype", "eos_token_id", "num_hidden_layers", "vocab_size")
V4_ROPES = [
    {},
    {"rope_theta": 500_000.0, "rope_scaling": None},
    {"rope_theta": 500_000, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}, "partial_rotary_factor": 0.5},
]
ROPES = [
    *V4_ROPES,
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
    {"rope_parameters": None, "rope_local_base_freq": 12_000.0},
    {"partial_rotary_factor": None},
    {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
    {
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 4, "long_factor": [2.0] * 4, "factor": 4.0},
        "original_max_position_embeddings": 64,
    },
    {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 2,
            "long_factor": [2.0] * 2,
            "original_max_position_embeddings": 64,
        },
        "partial_rotary_factor": 0.5,
    },
    {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 4}},
    {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}},
    {"rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "llama3"}},
    {"rope_scaling": "linear"},
]
VALUES = [None, 0, 1, 2, 3, 4, 5, -1, 48, 2.0, 0.5, True, False, "silu", "gelu_pytorch_tanh", "x", [], [1, 0, 1], {}]
VALUES += [["full_attention"] * 3, ["sliding_attention", "full_attention", "sliding_attention"], ["attention"] * 3]
DTYPES = [
    {},
    {"dtype": None},
    {"torch_dtype": "float16"},
    {"dtype": "bfloat16", "torch_dtype": "float32"},
    {"dtype": "x"},
]


def content_of(model_type):
    """The config.json that transformers writes for a tiny model."""
    return json.loads(tiny_config(COVERED[model_type].architecture).to_json_string(use_diff=False))


def outcome(read, folder):
    """What all that read a configuration get from it, or the errors they get."""
    try:
        config = read(folder)
        seen = {name: getattr(config.get_text_config(), name) for name in READ_OUTSIDE_THE_DECODER}
        content = config.to_dict()
        return decoder_config(config), seen, [content.get(key) for key in (*COUNT_KEYS, *MASK_KEYS)]
    except (ModelError, ArithmeticError, AttributeError, TypeError) as error:
        return str(error)


def save(folder, content):
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def assert_same(folder, content):
    save(folder, content)
    assert outcome(read_config, folder) == outcome(read_transformers_config, folder)


@pytest.mark.parametrize("model_type", COVERED)
def test_what_transformers_writes_is_read_alike_and_without_it(tmp_path, model_type):
    content = content_of(model_type)
    assert isinstance(read_config(save(tmp_path, content)), ConfigStandIn)
    assert_same(tmp_path, content)


@pytest.mark.parametrize("model_type", COVERED)
def test_a_file_that_leaves_out_what_may_be_left_out_is_read_alike_and_without_transformers(tmp_path, model_type):
    family = COVERED[model_type]
    content = {name: value for name, value in content_of(model_type).items() if name not in family.config.values}
    del content["architectures"], content["dtype"]
    assert config_without_transformers(content) is not None
    assert_same(tmp_path, content)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("model_type", COVERED)
def test_any_file_is_read_alike(tmp_path, model_type, data):
    content = content_of(model_type)
    names = sorted(content.keys() & {*TYPES, *COVERED[model_type].config.types})
    absent = data.draw(st.lists(st.sampled_from(names), max_size=3), label="absent")
    changed = data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from(VALUES), max_size=2), label="changed")
    rope = data.draw(st.sampled_from([{"rope_parameters": content.get("rope_parameters")}, *ROPES]), label="rope")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    kept = {k: v for k, v in content.items() if k not in (*absent, "rope_parameters", "dtype")}
    assert_same(tmp_path, {**kept, **changed, **rope, **dtype})


@pytest.mark.parametrize("rope", V4_ROPES)
def test_ropes_under_their_older_names_are_read_alike_and_without_transformers(tmp_path, rope):
    content = {name: value for name, value in content_of("llama").items() if name != "rope_parameters"} | rope
    assert config_without_transformers(content) is not None
    assert_same(tmp_path, content)


@pytest.mark.parametrize("model_type", ["phi3", "llama"])
def test_longrope_is_read_alike_and_without_transformers(tmp_path, model_type):
    factors = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    content = {name: value for name, value in content_of(model_type).items() if name != "rope_parameters"}
    content |= {"rope_scaling": factors, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    assert config_without_transformers(content) is not None
    assert_same(tmp_path, content)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["MistralForCausalLM"]},
        {"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]},
        {"is_encoder_decoder": True},
        {"quantization_config": {"quant_method": "gptq"}},
        {"num_nextn_predict_layers": 1, "mask_token_id": 7},
        {"eos_token_id": [2, 5]},
        {"eos_token_id": ["</s>"]},
        {"layer_types": ["full_attention"]},
        {"head_dim": 15},
        {"auto_map": {"AutoConfig": "modeling.Config"}},
    ],
)
def test_what_is_out_of_the_ordinary_is_read_alike(tmp_path, change):
    assert_same(tmp_path, content_of("llama") | change)


@pytest.mark.parametrize("model_type", [*COVERED, "gemma3"])
@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer"])
def test_more_layers_than_a_model_has_are_refused_before_anything_is_made_of_them(tmp_path, model_type, name):
    part = {name: 10**10}
    save(tmp_path, {"model_type": model_type} | ({"text_config": part} if model_type == "gemma3" else part))
    for read in (read_config, read_transformers_config):
        with pytest.raises(ModelError, match=rf"config.json: {name}: got 10000000000; may be at most \d+; mend it$"):
            read(tmp_path)


@pytest.mark.parametrize("types", [None, ["sliding_attention", "full_attention", "sliding_attention"]])
def test_a_file_of_mistral_with_layer_types_is_read_alike(tmp_path, types):
    assert_same(tmp_path, content_of("mistral") | {"layer_types": types})
