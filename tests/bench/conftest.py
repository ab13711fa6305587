"""An engine for benchmarks: a tiny configuration with made-up weights, as users time models."""

from __future__ import annotations

import pytest

from forerun import LLM
from tests.tiny_models import tiny_config


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("config-only")
    tiny_config("LlamaForCausalLM").save_pretrained(path)
    return path


@pytest.fixture
def llm(folder):
    return LLM(folder, load_format="dummy", max_model_len=256, num_gpu_blocks_override=64)
