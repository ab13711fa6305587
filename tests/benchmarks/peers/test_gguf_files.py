"""A checkpoint written as GGUF is the same model."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config

from benchmarks.peers.gguf_files import write_gguf
from forerun.errors import ModelError
from forerun.models.gguf.checkpoint import open_gguf_checkpoint
from tests.tiny_tokenizer import save_tiny_tokenizer

SIZES = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False, bos_token_id=0, eos_token_id=2))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return save_tiny_tokenizer(tmp_path / "model")


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_every_tensor_comes_back(folder, tmp_path, kind):
    write_gguf(folder, tmp_path / "model.gguf", kind)
    found = open_gguf_checkpoint(tmp_path / "model.gguf")
    expected = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert found.names() == expected.keys()
    for name, tensor in expected.items():
        tolerance = 1e-4 if kind == "f16" else 0.0  # the smallest bf16 numbers are none of f16's
        torch.testing.assert_close(found.load(name).float(), tensor, rtol=0, atol=tolerance)


def test_another_architecture_is_refused(tmp_path):
    Qwen2Config(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=r"got qwen2, rope type default; only llama .* leave llama_cpp and openvino out"
    ):
        write_gguf(tmp_path, tmp_path / "model.gguf", "bf16")
