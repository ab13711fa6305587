import json

import pytest
import torch
from safetensors.torch import save_file

from forerun.errors import ModelError
from forerun.models.checkpoint import StateDict, open_checkpoint, unstacked
from forerun.models.config import GRANITE_EXPERTS
from tests.tiny_gguf import save_tiny_gguf

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(1)}


@pytest.fixture
def single(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({name: TENSORS[name] for name in "bc"}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    return tmp_path


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_tensors_are_read_as_they_were_saved(layout, request):
    checkpoint = open_checkpoint(request.getfixturevalue(layout))
    assert checkpoint.names() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.load(name).dtype == tensor.dtype
        assert torch.equal(checkpoint.load(name), tensor)


def test_a_gguf_is_opened_where_there_is_nothing_else(tmp_path):
    save_tiny_gguf(tmp_path / "tiny.gguf")
    assert "model.norm.weight" in open_checkpoint(tmp_path).names()


def test_a_folder_without_weights_is_a_model_error_that_says_what_is_expected(tmp_path):
    with pytest.raises(ModelError, match=r"must hold model\.safetensors.*found none"):
        open_checkpoint(tmp_path)


def test_safetensors_under_another_name_are_named_in_the_error(tmp_path):
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="found adapter_model"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "x.pt", "x.pth", "x.ckpt"])
def test_pickled_weights_are_refused_with_the_reason_and_the_remedy(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"can run any code.*convert them to safetensors"):
        open_checkpoint(tmp_path)


def test_the_conversion_that_the_refusal_offers_works(tmp_path):
    shared = torch.arange(6.0).reshape(2, 3)
    heads = {"0.0.linear.weight": shared, "0.1.linear.weight": shared, "0.2.weight": shared.T}
    torch.save(heads, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelError) as error:
        open_checkpoint(tmp_path)
    code = str(error.value).split("with Python, ")[1]
    exec(code, {})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names() == heads.keys()
    assert all(torch.equal(checkpoint.load(name), tensor) for name, tensor in heads.items())


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_a_truncated_file_is_a_model_error_that_names_it(single, kept):
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged"):
        open_checkpoint(single)


def test_a_git_lfs_pointer_is_told_from_damage(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        open_checkpoint(tmp_path)


def test_a_missing_shard_is_a_model_error_that_names_it(sharded):
    (sharded / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"two\.safetensors: the file is missing"):
        open_checkpoint(sharded)


def test_an_index_that_lists_an_absent_tensor_is_a_model_error(sharded):
    write_index(sharded, {"a": "one.safetensors", "b": "two.safetensors", "d": "two.safetensors"})
    with pytest.raises(ModelError, match=r"lists tensor 'd' in two\.safetensors"):
        open_checkpoint(sharded)


def test_a_tensor_in_two_shards_is_a_model_error(sharded):
    save_file(TENSORS, sharded / "two.safetensors")
    with pytest.raises(ModelError, match=r"tensor 'a' is in one\.safetensors too"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_a_model_error(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"index\.json"):
        open_checkpoint(tmp_path)


def test_an_index_cannot_name_files_outside_the_folder(sharded):
    write_index(sharded, {"a": "../one.safetensors"})
    with pytest.raises(ModelError, match="must be a file beside the index"):
        open_checkpoint(sharded)


def test_a_tensor_of_all_experts_stands_as_one_for_each():
    width, inner, count = 6, 4, 3
    both, downs = torch.randn(count, 2 * inner, width), torch.randn(count, width, inner)
    layer = "model.layers.0.block_sparse_moe"
    tensors = {f"{layer}.input_linear.weight": both, f"{layer}.output_linear.weight": downs, "norm": torch.ones(2)}
    checkpoint = unstacked(StateDict(tensors), GRANITE_EXPERTS)
    assert len(checkpoint.names()) == 1 + 3 * count
    for number in range(count):
        expected = {"w1": both[number, :inner], "w3": both[number, inner:], "w2": downs[number]}
        for part, values in expected.items():
            name = f"{layer}.experts.{number}.{part}.weight"
            assert checkpoint.shape(name) == tuple(values.shape)
            assert torch.equal(checkpoint.load(name), values)
    assert torch.equal(checkpoint.load("norm"), torch.ones(2))
