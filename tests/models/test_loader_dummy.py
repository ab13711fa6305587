import math
from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig

from forerun.errors import ModelError
from forerun.models.checkpoint import open_checkpoint, unstacked
from forerun.models.config_file import read_transformers_config
from forerun.models.decoder import build_decoder
from forerun.models.families import FAMILIES, decoder_config
from forerun.models.loader import DummyCheckpoint, load_dummy
from tests.tiny_models import save_tiny_model, tiny_config

CPU = torch.device("cpu")
RANDOM_LLAMA_1B = Path(__file__).parents[2] / "benchmarks" / "configs" / "random-llama-1b"
LLAMA = "LlamaForCausalLM"


def dummy(architecture=LLAMA, dtype=torch.float32, **overrides):
    return DummyCheckpoint(tiny_config(architecture, **overrides), dtype=dtype)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_names_and_shapes_are_those_of_a_real_checkpoint(architecture, tied, tmp_path):
    config = tiny_config(architecture, tie_word_embeddings=tied)
    save_tiny_model(tmp_path, architecture, tie_word_embeddings=tied)
    own = decoder_config(config)
    real = open_checkpoint(tmp_path)
    if own.experts is not None:
        real = unstacked(real, own.experts.names)
    stored = {name: real.shape(name) for name in real.names()}
    unused = own.unused_prefixes
    checkpoint = DummyCheckpoint(config, dtype=torch.float32)
    found = {name: checkpoint.shape(name) for name in checkpoint.names()}
    assert found == {name: shape for name, shape in stored.items() if not name.startswith(unused)}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_decoder_takes_every_tensor_and_no_norm_changes_a_scale(architecture):
    config = tiny_config(architecture)
    decoder = build_decoder(config, DummyCheckpoint(config, dtype=torch.float32), dtype=torch.float32, device=CPU)
    assert torch.equal(decoder.norm.weight, torch.ones(config.get_text_config().hidden_size))


def test_a_name_always_gives_the_same_values_and_another_name_others():
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(dummy().load(first), dummy().load(first))
    assert not torch.equal(dummy().load(first), dummy().load(second))


def test_weights_are_small_and_in_the_dtype_asked_for():
    tensor = dummy(dtype=torch.bfloat16).load("model.embed_tokens.weight")
    assert tensor.dtype == torch.bfloat16
    assert math.isclose(tensor.float().std().item(), 0.02, rel_tol=0.05)


def test_an_architecture_of_transformers_own_code_is_refused():
    config = GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"])
    with pytest.raises(ModelError, match="'GPTNeoXForCausalLM' runs through transformers' own code"):
        DummyCheckpoint(config, dtype=torch.float32)


def test_experts_on_a_gpu_are_refused_as_transformers_computes_them_there():
    config = tiny_config("Qwen3MoeForCausalLM")
    assert DummyCheckpoint(config, dtype=torch.float32).names()
    with pytest.raises(ModelError, match="'Qwen3MoeForCausalLM' runs through transformers' own code"):
        DummyCheckpoint(config, dtype=torch.float32, device=torch.device("cuda"))


@pytest.mark.parametrize(("asked", "got"), [(None, torch.bfloat16), (torch.float64, torch.float64)])
def test_the_dtype_is_the_configurations_unless_another_is_asked_for(asked, got, tmp_path):
    tiny_config(LLAMA, dtype="bfloat16").save_pretrained(tmp_path)
    assert load_dummy(tmp_path, dtype=asked, device=CPU).dtype == got


def test_the_committed_benchmark_model_has_the_number_of_parameters_of_its_name():
    checkpoint = DummyCheckpoint(read_transformers_config(RANDOM_LLAMA_1B), dtype=torch.bfloat16)
    assert sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names()) == 1_073_809_408
