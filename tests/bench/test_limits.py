"""The least of the KV cache that a forward pass reads."""

from __future__ import annotations

from dataclasses import replace

import torch

from forerun.bench.limits import PassBytes
from forerun.models.families import decoder_config
from tests.tiny_models import tiny_config


def fp32_limit(config):
    return PassBytes(config, torch.float32, weights=0)


def test_kv_is_a_key_and_a_value_per_layer_head_and_token():
    config = decoder_config(tiny_config("LlamaForCausalLM"))  # 3 layers, 2 KV heads of width 8
    assert fp32_limit(config).kv(100) == 100 * 3 * 2 * (8 + 8) * 4


def test_a_layer_with_a_window_reads_no_more_than_that():
    config = decoder_config(tiny_config("LlamaForCausalLM"))
    windowed = replace(config, windows=(10, None, 200))
    assert fp32_limit(windowed).kv(100) == (10 + 100 + 100) * 2 * (8 + 8) * 4
