import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPTNeoXConfig,
    InternLM3Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    T5Config,
)

from forerun.errors import ModelError
from forerun.models import loader
from forerun.models.config_file import eos_token_ids, read_config
from forerun.models.decoder import Decoder
from forerun.models.loader import load_model
from forerun.models.tokenizer import load_tokenizer
from forerun.models.transformers_model import TransformersModel
from tests.family_gguf import save_family
from tests.models.quantized.test_loading import METHODS, quantize
from tests.models.quantized.test_loading import SIZES as QUANTIZED_SIZES
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = LlamaConfig(**SIZES)
NEOX = GPTNeoXConfig(**{name: size for name, size in SIZES.items() if name != "num_key_value_heads"})


def save(config, folder, *, dtype=torch.float32):
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def save_config(folder, **content):
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def load(folder, dtype=None):
    return load_model(folder, dtype=dtype, device=CPU)


def refused(folder):
    """The message of the `ModelError` that loading raises; one line."""
    with pytest.raises(ModelError) as error:
        load(folder)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_an_architecture_with_a_table_row_gets_our_decoder(tmp_path):
    assert isinstance(load(save(LLAMA, tmp_path)), Decoder)


def test_any_other_architecture_runs_in_transformers_code(tmp_path):
    assert isinstance(load(save(NEOX, tmp_path)), TransformersModel)


def test_a_gguf_file_gets_our_decoder(tmp_path):
    save_tiny_gguf(tmp_path / "tiny.gguf")
    assert isinstance(load(tmp_path / "tiny.gguf"), Decoder)


@pytest.mark.parametrize("form", ["stored as it was", "gguf", "gptq"])
def test_with_experts_on_a_gpu_transformers_computes_what_it_reads(tmp_path, monkeypatch, form):
    monkeypatch.setattr(loader, "_is_faster_in_transformers", lambda _config, _device: True)
    if form == "gguf":
        folder = save_family(tmp_path, "qwen3moe")
    else:
        folder = save_tiny_model(tmp_path, "MixtralForCausalLM", **QUANTIZED_SIZES)
    if form == "gptq":
        quantize(folder, *METHODS["gptq"], symmetric=False)
    assert isinstance(load(folder), TransformersModel if form == "stored as it was" else Decoder)


@pytest.mark.parametrize("config", [LLAMA, NEOX], ids=["decoder", "transformers"])
def test_without_a_dtype_the_model_keeps_the_checkpoints(tmp_path, config):
    assert load(save(config, tmp_path, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("config", [LLAMA, NEOX], ids=["decoder", "transformers"])
def test_a_dtype_replaces_the_checkpoints(tmp_path, config):
    assert load(save(config, tmp_path, dtype=torch.bfloat16), torch.float32).dtype == torch.float32


@pytest.mark.parametrize("config", [LLAMA, NEOX], ids=["decoder", "transformers"])
def test_a_configuration_without_dtype_leaves_it_to_the_weights(tmp_path, config):
    save(config, tmp_path, dtype=torch.bfloat16)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["dtype"]
    save_config(tmp_path, **content)
    assert load(tmp_path).dtype == torch.bfloat16


def test_a_missing_folder_is_refused(tmp_path):
    assert "there is no such folder; check the path" in refused(tmp_path / "absent")


def test_a_folder_without_config_is_refused(tmp_path):
    assert "not a model folder (no config.json)" in refused(tmp_path)


@pytest.mark.parametrize("content", ["{", "", "\xff"])
def test_a_config_that_is_not_json_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json: not JSON" in refused(tmp_path)


def test_a_config_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    assert "must be a JSON object" in refused(tmp_path)


def test_a_config_without_model_type_is_refused(tmp_path):
    assert "has no model_type" in refused(save_config(tmp_path, hidden_size=3))


def test_a_config_with_impossible_values_is_refused(tmp_path):
    assert "cannot be used" in refused(save_config(tmp_path, model_type="llama", hidden_size="wide"))


def test_an_unknown_architecture_is_named_with_what_to_do(tmp_path):
    message = refused(save_config(tmp_path, model_type="zorblax"))
    assert "architecture 'zorblax' is unknown to the installed transformers; upgrade" in message


def test_code_that_comes_with_a_model_is_refused(tmp_path):
    (tmp_path / "modeling_zorblax.py").write_text("raise SystemExit")
    auto_map = {"AutoConfig": "modeling_zorblax.Config", "AutoModelForCausalLM": "modeling_zorblax.Model"}
    assert "which is never run" in refused(save_config(tmp_path, model_type="zorblax", auto_map=auto_map))


def test_a_method_of_quantization_that_is_not_supported_is_named_with_its_file(tmp_path):
    content = LLAMA.to_dict() | {"quantization_config": {"quant_method": "gptq", "bits": 3}}
    message = refused(save_config(tmp_path, **content))
    assert "config.json: quantization_config (gptq): bits: got 3; may be 2, 4, 8" in message


def test_an_encoder_decoder_is_refused(tmp_path):
    T5Config(d_model=8, num_layers=1).save_pretrained(tmp_path)
    assert "'t5' is an encoder-decoder" in refused(tmp_path)


@pytest.mark.parametrize("architecture", [BertForMaskedLM, LlamaForSequenceClassification])
def test_a_model_without_a_causal_head_is_refused(tmp_path, architecture):
    config = LLAMA if architecture is LlamaForSequenceClassification else BertConfig(hidden_size=32)
    content = config.to_dict() | {"architectures": [architecture.__name__]}
    assert f"{architecture.__name__} is not a causal language model" in refused(save_config(tmp_path, **content))


def test_a_model_that_transformers_computes_as_another_loads_under_its_own_name(tmp_path):
    config = InternLM3Config(**SIZES, head_dim=8)
    expected = load(save(config, tmp_path)).config
    save_config(tmp_path, **config.to_dict() | {"architectures": ["InternLM3ForCausalLM"]})
    assert load(tmp_path).config == expected


@pytest.mark.parametrize("config", [LLAMA, NEOX], ids=["decoder", "transformers"])
def test_missing_weights_are_refused(tmp_path, config):
    config.save_pretrained(tmp_path)
    assert "no weights; must hold model.safetensors" in refused(tmp_path)


@pytest.mark.parametrize("config", [LLAMA, NEOX], ids=["decoder", "transformers"])
def test_damaged_weights_are_refused(tmp_path, config):
    save(config, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "model.safetensors: damaged" in refused(tmp_path)


def test_a_config_that_names_no_architecture_gets_the_causal_one_of_its_type(tmp_path):
    assert read_config(save_config(tmp_path, model_type="llama")).architectures == ["LlamaForCausalLM"]


def test_reading_a_config_gives_transformers_object_with_its_defaults(tmp_path):
    save_config(tmp_path, model_type="llama", hidden_size=64)
    config = read_config(tmp_path)
    assert (config.hidden_size, config.num_hidden_layers) == (64, 32)


@pytest.mark.parametrize(("eos", "expected"), [(2, {2}), ([2, 5], {2, 5})])
def test_eos_comes_from_the_generation_config(tmp_path, eos, expected):
    save_config(tmp_path, model_type="llama", eos_token_id=9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize("generation", [None, "{}"])
def test_without_one_there_eos_comes_from_the_config(tmp_path, generation):
    save_config(tmp_path, model_type="llama", eos_token_id=[9, 3])
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)
    assert eos_token_ids(tmp_path) == {9, 3}


@pytest.mark.parametrize(("eos", "expected"), [(9, {9, 2}), (None, {2})])
def test_the_tokenizers_eos_ends_a_text_too(tmp_path, eos, expected):
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    save_config(tmp_path, model_type="llama", eos_token_id=eos)
    assert eos_token_ids(tmp_path, load_tokenizer(tmp_path)) == expected


def test_a_model_may_have_no_eos(tmp_path):
    assert eos_token_ids(save_config(tmp_path, model_type="llama", eos_token_id=None)) == frozenset()


def test_eos_of_a_gguf_is_that_of_its_metadata_and_the_end_of_a_text(tmp_path):
    save_tiny_gguf(tmp_path / "tiny.gguf")
    assert eos_token_ids(tmp_path / "tiny.gguf") == {2, 0}


@pytest.mark.parametrize("eos", ["</s>", [1.5], -1])
def test_eos_that_is_no_token_id_is_refused(tmp_path, eos):
    save_config(tmp_path, model_type="llama")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ModelError, match="must be a token id or a list of them"):
        eos_token_ids(tmp_path)
