"""Engine settings: ranges and misspellings."""

from __future__ import annotations

import pytest
import torch

from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError, MemoryBudgetError
from tests.engines import tiny_llm


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"max_num_seq": 8}, "did you mean 'max_num_seqs'"),
        ({"max_num_seqs": 0}, "integer of 1 or more"),
        ({"max_model_len": 1}, "max_model_len: got 1; must be an integer of 2 or more"),
        ({"block_size": 2.5}, "integer of 1 or more"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "at least max_num_seqs"),
        ({"dtype": "int7"}, "may be auto"),
        ({"dtype": torch.int8}, "dtype: got torch.int8; may be auto"),
        ({"dtype": ["float32"]}, "dtype: got ['float32']; may be auto"),
        ({"load_format": "safetensor"}, "may be auto, dummy"),
        ({"quantization": "int3"}, "quantization: got 'int3'; may be int8, int4, int4-symmetric, or None"),
        ({"quantization": "int8", "dtype": "float32"}, "may be auto or bfloat16"),
        ({"quantization": "int8", "dtype": torch.float16}, "may be auto or bfloat16"),
        ({"activation_dtype": "int4"}, "activation_dtype: got 'int4'; may be auto, bfloat16, int16, int8"),
        ({"activation_dtype": "int8", "dtype": "float32"}, "with activation_dtype='int8'; may be auto or bfloat16"),
        ({"device": "toaster"}, "may be auto, cpu"),
        ({"device": "mps"}, "may be auto, cpu, cuda or cuda:N"),
        ({"device": None}, "device: got None; may be auto, cpu, cuda or cuda:N"),
        ({"seed": "x"}, "seed: got 'x'; must be an integer"),
        ({"seed": 1.5}, "must be an integer"),
        ({"seed": True}, "must be an integer"),
        ({"tensor_parallel_size": 0}, "integer of 1 or more"),
        ({"trust_remote_code": True}, "got True; may be False, as forerun runs no code from checkpoints"),
        ({"trust_remote_code": "no"}, "got 'no'; may be False"),
        ({"tokenizer": 3}, "tokenizer: got 3; must be a folder"),
        ({"generation_config": None}, "generation_config: got None; may be 'auto', 'vllm' or a folder"),
        (
            {"override_generation_config": [("top_k", 3)]},
            "override_generation_config: got [('top_k', 3)]; must be a dict",
        ),
        ({"override_generation_config": {"top_p": 2}}, "override_generation_config: top_p: got 2; must be above 0"),
        ({"override_generation_config": {"max_tokens": 2}}, "unknown key 'max_tokens'; did you mean 'max_new_tokens'?"),
        ({"gpu_memory_utilization": 1.5}, "above 0 and at most 1"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization: got '0.9'; must be above 0 and at most 1"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching: got 'no'; may be True or False"),
        ({"enforce_eager": "no"}, "enforce_eager: got 'no'; may be True or False"),
        ({"cudagraph_capture_sizes": [1, 0]}, "numbers of rows from 1 to max_num_batched_tokens (2048)"),
        ({"cudagraph_capture_sizes": [4096]}, "from 1 to max_num_batched_tokens (2048)"),
        ({"cudagraph_capture_sizes": []}, "set enforce_eager=True for no graphs"),
        ({"cudagraph_capture_sizes": "8"}, "cudagraph_capture_sizes: got '8'"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_may_be(settings, hint):
    with pytest.raises(ConfigError) as caught:
        _ = EngineSettings.from_keywords("m", settings).torch_device
    assert hint in str(caught.value)


def test_graphs_are_for_as_many_rows_as_a_step_may_have():
    assert EngineSettings(model="m").graph_sizes[-1] == 256
    assert EngineSettings(model="m", max_num_batched_tokens=100).graph_sizes[-1] == 96
    assert EngineSettings(model="m", max_num_seqs=100).graph_sizes[-1] == 384
    assert EngineSettings(model="m", max_num_seqs=1000).graph_sizes[-1] == 1024
    assert EngineSettings(model="m", cudagraph_capture_sizes=[8, 2, 8]).graph_sizes == (2, 8)


def test_memory_for_less_than_one_sequence_is_refused_with_the_numbers():
    with pytest.raises(
        MemoryBudgetError, match=r"max_model_len=128 tokens needs .* MiB, got .* MiB \(64 tokens\); lower"
    ):
        tiny_llm(num_gpu_blocks_override=16)


def test_max_model_len_above_the_models_is_refused():
    with pytest.raises(ConfigError, match="the model allows at most"):
        tiny_llm(max_model_len=10**6)


def test_without_max_model_len_the_memory_decides_and_a_warning_says_so(caplog):
    llm = tiny_llm(max_model_len=None, num_gpu_blocks_override=16)
    assert llm.max_model_len == 64
    assert "raise kv_cache_memory_bytes" in caplog.text
