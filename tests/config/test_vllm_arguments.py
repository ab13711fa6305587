"""Arguments of vLLM's that forerun has no setting for."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.config.settings import EngineSettings
from forerun.config.vllm_arguments import INSTEAD, NEUTRAL
from forerun.errors import ConfigError


def test_arguments_of_vllms_that_ask_for_nothing_are_taken():
    asks_for_nothing = {
        "disable_log_stats": True,
        "enable_chunked_prefill": True,
        "tokenizer_mode": "auto",
        "revision": None,
        "enable_lora": False,
        "pipeline_parallel_size": 1,
        "swap_space": 4,
        "cpu_offload_gb": 0.0,
        "max_logprobs": 50,
        "kv_cache_dtype": "auto",
        "skip_tokenizer_init": False,
        "hf_overrides": {},
    }
    assert EngineSettings.from_keywords("m", asks_for_nothing | {"seed": 7}) == EngineSettings(model="m", seed=7)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("enable_lora", True, "enable_lora: got True; may be False, "),
        ("enable_lora", 0, "may be False"),
        ("enable_chunked_prefill", False, "may be None or True"),
        (
            "tokenizer_mode",
            "slow",
            "may be 'auto' or 'hf', as forerun has nothing else of this argument of vLLM's; leave it",
        ),
        ("pipeline_parallel_size", True, "may be 1"),
        ("revision", "v1.0", "give its folder as model"),
        ("reasoning_parser", "qwen3", "give it to forerun serve"),
        ("swap_space", "4", "may be any int or any float"),
        ("hf_overrides", np.arange(3), "may be None or {}"),
    ],
)
def test_arguments_of_vllms_that_ask_for_something_are_refused(name, value, said):
    with pytest.raises(ConfigError, match=said) as caught:
        EngineSettings.from_keywords("m", {name: value})
    assert "\n" not in str(caught.value)


def test_no_setting_of_forerun_is_taken_for_one_that_only_vllm_has():
    assert not NEUTRAL.keys() & EngineSettings.__dataclass_fields__.keys()
    assert INSTEAD.keys() <= NEUTRAL.keys()
