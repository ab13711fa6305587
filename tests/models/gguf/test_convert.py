"""Conversion of GGUF files into folders of safetensors."""

import json

import gguf as gguf_writing
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from forerun.errors import ModelError
from forerun.models.checkpoint import WeightReader, open_checkpoint
from forerun.models.completed_config import config_without_transformers
from forerun.models.config_file import eos_token_ids
from forerun.models.gguf.convert import convert_gguf
from forerun.models.tokenizer import load_tokenizer
from forerun.models.tokenizer_files import tokenizer_without_transformers
from tests.family_gguf import FAMILY_GGUFS, save_family
from tests.tiny_gguf import save_tiny_gguf

WITH_FACTORS = {"llama 3.1", "phi3 longrope"}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    save_tiny_gguf(path, quantized=True)
    return path


@pytest.fixture(scope="module")
def converted(gguf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(gguf, folder, dtype=torch.bfloat16)
    return folder


def test_a_converted_model_has_the_weights_of_the_gguf(gguf, converted):
    checkpoint, written = open_checkpoint(gguf), load_file(converted / "model.safetensors")
    reader = WeightReader(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert written.keys() == checkpoint.names()
    assert all(torch.equal(written[name], reader.tensor(name, checkpoint.shape(name))) for name in written)


@pytest.mark.parametrize("kind", sorted(FAMILY_GGUFS.keys() - WITH_FACTORS))
def test_a_converted_configuration_is_read_alike_by_transformers_and_without(tmp_path, kind):
    (tmp_path / "made").mkdir()
    convert_gguf(save_family(tmp_path, kind), tmp_path / "made", dtype=torch.float32)
    theirs, ours = AutoConfig.from_pretrained(tmp_path / "made"), AutoConfig.from_pretrained(tmp_path)
    for name in ("hidden_size", "num_key_value_heads", "tie_word_embeddings", "layer_types", "sliding_window"):
        assert getattr(theirs, name, None) == getattr(ours, name, None)
    content = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config_without_transformers(content) is not None


def test_where_a_part_of_each_head_rotates_transformers_is_told_so(tmp_path):
    (tmp_path / "made").mkdir()
    convert_gguf(save_family(tmp_path, "phi3 in part"), tmp_path / "made", dtype=torch.float32)
    assert AutoConfig.from_pretrained(tmp_path / "made").rope_parameters["partial_rotary_factor"] == 0.5


def test_a_part_of_each_head_that_transformers_would_not_rotate_alone_is_refused(tmp_path, monkeypatch):
    add = gguf_writing.GGUFWriter.add_rope_dimension_count
    monkeypatch.setattr(
        gguf_writing.GGUFWriter, "add_rope_dimension_count", lambda writer, count: add(writer, count // 2)
    )
    (tmp_path / "made").mkdir()
    with pytest.raises(ModelError, match="cannot say of this architecture that a part of each head rotates"):
        convert_gguf(save_family(tmp_path, "qwen2"), tmp_path / "made", dtype=torch.float32)


@pytest.mark.parametrize("kind", sorted(WITH_FACTORS))
def test_rope_factors_are_refused(tmp_path, kind):
    with pytest.raises(ModelError, match="cannot hold its rope factors"):
        convert_gguf(save_family(tmp_path, kind), tmp_path, dtype=torch.float32)


def test_a_converted_model_is_read_without_transformers(converted):
    assert config_without_transformers(json.loads((converted / "config.json").read_text())) is not None
    assert tokenizer_without_transformers(converted) is not None


def test_a_converted_model_loads_in_transformers_in_its_dtype(converted):
    model, info = AutoModelForCausalLM.from_pretrained(converted, dtype="auto", output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_all_files_of_a_converted_model_may_be_read_by_whom_a_new_file_may_be(converted, tmp_path):
    (tmp_path / "new").touch()
    modes = {file.name: file.stat().st_mode for file in converted.iterdir()}
    assert modes == dict.fromkeys(modes, (tmp_path / "new").stat().st_mode)


def test_a_converted_tokenizer_encodes_as_the_ggufs(gguf, converted):
    text = "<|im_start|>the héllo 🙂<|im_end|>"
    expected = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).encode(text)
    assert load_tokenizer(converted).encode(text) == expected


def test_a_converted_model_ships_its_chat_template(converted):
    assert "<|im_start|>" in (converted / "chat_template.jinja").read_text()
    assert load_tokenizer(converted).has_chat_template


def test_a_converted_model_stops_at_eos_and_at_the_end_of_text(converted):
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert eos_token_ids(converted) == {2, 0}
