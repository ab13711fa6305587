"""What users write, and what it resolves to."""

from __future__ import annotations

import logging

import pytest

from forerun.config.drafter_config import KeyResolver
from forerun.config.speculative_config import resolve_speculative
from forerun.errors import ConfigError

RESOLVER = KeyResolver(max_draft_tokens=5, shared_keys=())


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", "eagle"),
        ("/models/medusa-vicuna-7b", "medusa"),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("someone/P-EAGLE-8B", "peagle"),
        ("z-lab/Qwen3-8B-DFlash-b16", "dflash"),
        ("amd/PARD-Llama-3.2-1B", "pard"),
        ("HuggingFaceTB/SmolLM2-135M", "draft_model"),
        ("ngram", "ngram"),
        ("[suffix]", "suffix"),
    ],
)
def test_a_model_alone_tells_its_method(model, method):
    found, _ = RESOLVER.resolve({"model": model}, other_keys=())
    assert found == method


def test_a_given_method_counts_more_than_the_models_name():
    assert RESOLVER.resolve({"method": "draft_model", "model": "my-eagle"}, other_keys=())[0] == "draft_model"


def test_keys_without_effect_are_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        resolve_speculative({"method": "ngram", "num_speculative_tokens": 2, "disable_padded_drafter_batch": "False"})
    assert "disable_padded_drafter_batch has no effect" in caplog.text


def test_a_key_in_two_spellings_is_refused():
    twice = {"num-speculative-tokens": 2, "num_speculative_tokens": 3}
    said = "given twice in speculative_config, as 'num-speculative-tokens' and as 'num_speculative_tokens'; keep one"
    for given in ({"method": "ngram", **twice}, {"method": "hybrid", "drafters": [{"method": "ngram", **twice}]}):
        with pytest.raises(ConfigError, match=said):
            resolve_speculative(given)


def test_one_process_is_all_there_is():
    resolve_speculative({"method": "ngram", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1})
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size: got 4; must be 1"):
        resolve_speculative({"method": "ngram", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 4})
