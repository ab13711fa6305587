"""Each system gets speculation in its own words, or an error that says what it has."""

from __future__ import annotations

import pytest

from forerun.errors import ConfigError
from forerun.plan.emit.speculation import SGLANG_ALGORITHMS, TRTLLM_TYPES, sglang_options, trtllm_config, vllm_config
from tests.plan.emit.plans import EAGLE3, NGRAM, SCHEDULE


def test_vllm_gets_the_configuration_as_it_is():
    assert vllm_config(NGRAM | SCHEDULE) == NGRAM | SCHEDULE


@pytest.mark.parametrize("translate", [vllm_config, sglang_options, trtllm_config])
@pytest.mark.parametrize("method", ["auto", "recycle", "hybrid", "self", None])
def test_a_method_that_a_system_lacks_is_refused_with_those_that_it_has(translate, method):
    with pytest.raises(ConfigError, match=r"may be ngram.*--speculative-config"):
        translate({"method": method, "num_speculative_tokens": 3})


@pytest.mark.parametrize("translate", [vllm_config, sglang_options, trtllm_config])
def test_a_key_that_a_system_lacks_is_refused_not_dropped(translate):
    with pytest.raises(ConfigError, match="recycle_tree"):
        translate(NGRAM | {"recycle_tree": True})


def test_sglang_drafts_a_chain_and_counts_the_last_token_among_the_verified_ones():
    assert sglang_options(EAGLE3) == {
        "speculative-algorithm": "EAGLE3",
        "speculative-draft-model-path": "org/head",
        "speculative-num-steps": 3,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": 4,
    }


def test_sglang_has_no_schedule():
    with pytest.raises(ConfigError, match="no schedule by batch size"):
        sglang_options(NGRAM | SCHEDULE)


def test_trtllm_gets_the_last_batch_size_of_each_range_and_nothing_where_nothing_is_drafted():
    assert trtllm_config(NGRAM | SCHEDULE) == {
        "decoding_type": "NGram",
        "max_draft_len": 4,
        "max_matching_ngram_size": 5,
        "draft_len_schedule": {4: 4, 16: 2},
    }


@pytest.mark.parametrize(
    "schedule", [[[1, 8, 2]], [[1, 4, 4], [5, 8, 1], [9, 16, 2]], [[1, 4, 0]], [[1, 4, 0], [5, 8, 4]]]
)
def test_trtllm_refuses_schedules_that_it_cannot_have(schedule):
    with pytest.raises(ConfigError, match="draft_len_schedule"):
        trtllm_config(NGRAM | {"num_speculative_tokens_per_batch_size": schedule})


@pytest.mark.parametrize("translate", [sglang_options, trtllm_config])
def test_a_head_without_a_model_or_a_length_is_refused(translate):
    for missing in ("model", "num_speculative_tokens"):
        with pytest.raises(ConfigError, match=missing):
            translate({key: value for key, value in EAGLE3.items() if key != missing})


def test_trtllm_and_sglang_name_the_drafter():
    assert trtllm_config(EAGLE3) == {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "org/head"}
    assert set(SGLANG_ALGORITHMS) == set(TRTLLM_TYPES) | {"eagle"}
