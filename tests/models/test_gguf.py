import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from forerun.errors import ModelError
from forerun.models import gguf as gguf_files
from forerun.models.gguf import convert_gguf, load_gguf, read_gguf_config
from forerun.models.model_folder import find_gguf
from forerun.models.tokenizer import load_tokenizer
from tests.tiny_gguf import save_tiny_gguf


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    save_tiny_gguf(path)
    return path


@pytest.fixture(scope="module")
def converted(gguf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    convert_gguf(gguf, folder, dtype=torch.bfloat16)
    return folder


def test_the_configuration_is_that_of_the_metadata(gguf):
    config = read_gguf_config(gguf)
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("llama", 32, 2)


def test_weights_are_the_files_under_transformers_names(tmp_path):
    path = tmp_path / "tiny.gguf"
    tensors = save_tiny_gguf(path)
    _, checkpoint = load_gguf(path)
    found = checkpoint.load("model.layers.1.mlp.down_proj.weight")
    assert torch.equal(found, torch.from_numpy(tensors["blk.1.ffn_down.weight"]))


def test_tied_embeddings_are_one_tensor(gguf):
    config, checkpoint = load_gguf(gguf)
    assert config.tie_word_embeddings
    assert "lm_head.weight" not in checkpoint.names()


def test_quantized_weights_come_out_dense(tmp_path):
    path = tmp_path / "tiny.gguf"
    tensors = save_tiny_gguf(path, quantized=True)
    _, checkpoint = load_gguf(path)
    found = checkpoint.load("model.layers.0.mlp.up_proj.weight")
    assert checkpoint.shape("model.layers.0.mlp.up_proj.weight") == (64, 32)
    torch.testing.assert_close(found, torch.from_numpy(tensors["blk.0.ffn_up.weight"]), atol=0.03, rtol=0)


def test_weights_take_the_dtype_asked_for(gguf):
    _, checkpoint = load_gguf(gguf, dtype=torch.bfloat16)
    assert {checkpoint.load(name).dtype for name in checkpoint.names()} == {torch.bfloat16}


def test_a_converted_model_has_the_weights_of_the_gguf(gguf, converted):
    _, checkpoint = load_gguf(gguf, dtype=torch.bfloat16)
    written = load_file(converted / "model.safetensors")
    assert written.keys() == checkpoint.names()
    assert all(torch.equal(written[name], checkpoint.load(name)) for name in written)


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


def test_a_tokenizer_can_be_read_from_the_gguf_itself(gguf):
    assert load_tokenizer(gguf).decode(load_tokenizer(gguf).encode("héllo")) == "héllo"


def test_loading_prints_nothing(gguf, capfd):
    load_gguf(gguf)
    assert capfd.readouterr() == ("", "")


def test_a_folder_with_one_gguf_and_no_safetensors_means_the_gguf(gguf):
    assert find_gguf(gguf.parent) == gguf


def test_safetensors_in_a_folder_come_before_a_gguf(tmp_path):
    (tmp_path / "a.gguf").touch()
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(tmp_path) is None


def test_several_ggufs_in_a_folder_are_refused(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match="give the path of one"):
        find_gguf(tmp_path)


def test_a_missing_file_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        load_gguf(tmp_path / "absent.gguf")


def test_a_file_of_another_kind_is_a_model_error(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_gguf_config(tmp_path / "a.gguf")


@pytest.mark.parametrize("kept", [0.001, 0.3, 0.99])
def test_a_truncated_file_is_a_model_error(gguf, tmp_path, kept):
    content = gguf.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: max(8, int(len(content) * kept))])
    with pytest.raises(ModelError, match="cannot be read"):
        load_gguf(tmp_path / "cut.gguf")


def test_without_accelerate_the_error_says_what_to_install(gguf, monkeypatch):
    monkeypatch.setattr(gguf_files, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install accelerate"):
        load_gguf(gguf)
