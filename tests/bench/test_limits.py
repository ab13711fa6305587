"""The least a forward pass reads, against the checkpoint's own tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from forerun.bench.limits import PassBytes
from forerun.models.dummy import DummyCheckpoint
from forerun.models.families import FAMILIES, decoder_config
from tests.tiny_models import tiny_config


def fp32_limit(config):
    return PassBytes(config, torch.float32, weight_dtype=torch.float32)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_weights_are_all_matrices_but_an_embedding_that_is_only_looked_up(architecture, tied):
    hf_config = tiny_config(architecture, tie_word_embeddings=tied)
    checkpoint = DummyCheckpoint(hf_config, dtype=torch.bfloat16)
    matrices = {
        name: math.prod(checkpoint.shape(name)) for name in checkpoint.names() if len(checkpoint.shape(name)) == 2
    }
    config = decoder_config(hf_config)
    looked_up = 0 if config.tied else matrices[f"{config.root}embed_tokens.weight"]
    limit = PassBytes(config, torch.bfloat16, weight_dtype=torch.bfloat16)
    assert limit.weights == 2 * (sum(matrices.values()) - looked_up)


def test_int8_weights_are_a_byte_each_and_a_scale_per_output():
    hf_config = tiny_config("LlamaForCausalLM", tie_word_embeddings=True)
    checkpoint = DummyCheckpoint(hf_config, dtype=torch.bfloat16)
    shapes = [checkpoint.shape(name) for name in checkpoint.names() if len(checkpoint.shape(name)) == 2]
    limit = PassBytes(decoder_config(hf_config), torch.bfloat16, weight_dtype=torch.int8)
    assert limit.weights == sum(outputs * inputs + 4 * outputs for outputs, inputs in shapes)


def test_kv_is_a_key_and_a_value_per_layer_head_and_token():
    config = decoder_config(tiny_config("LlamaForCausalLM"))  # 3 layers, 2 KV heads of width 8
    assert fp32_limit(config).kv(100) == 100 * 3 * 2 * (8 + 8) * 4


def test_a_layer_with_a_window_reads_no_more_than_that():
    config = decoder_config(tiny_config("LlamaForCausalLM"))
    windowed = replace(config, windows=(10, None, 200))
    assert fp32_limit(windowed).kv(100) == (10 + 100 + 100) * 2 * (8 + 8) * 4
