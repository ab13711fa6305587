"""Each system gets speculation in its own words, or an error that says what it has."""

from __future__ import annotations

from functools import partial

import pytest

from forerun.engine.speculation import FixedLength
from forerun.errors import ConfigError
from forerun.plan.emit.speculation import (
    SGLANG_ALGORITHMS,
    TRTLLM_TYPES,
    ngram_notes,
    sglang_options,
    vllm_config,
    vllm_notes,
)
from forerun.plan.emit.speculation import trtllm_config as trtllm_config_of
from tests.plan.emit import schemas
from tests.plan.emit.plans import EAGLE3, NGRAM, SCHEDULE, WINDOW

trtllm_config = partial(trtllm_config_of, max_num_seqs=64)


def test_vllm_gets_the_configuration_as_it_is():
    assert vllm_config(NGRAM | WINDOW | SCHEDULE) == NGRAM | WINDOW | SCHEDULE


def test_vllm_verifies_by_its_own_rule_where_forerun_matches_and_a_note_says_so():
    assert vllm_config(NGRAM | {"rejection_sample_method": "matching"}) == NGRAM
    assert any("rejection sampling" in note for note in vllm_notes(NGRAM))
    with pytest.raises(ConfigError, match="rejection_sample_method"):
        vllm_config(NGRAM | {"rejection_sample_method": "typical"})


@pytest.mark.parametrize(
    "others",
    [
        {"use_heterogeneous_vocab": True},
        {"enable_adaptive_verification": False},
        {"attention_backend": "FLASH_ATTN", "enforce_eager": True},
        {"draft_sample_method": "probabilistic", "quantization": "fp8"},
    ],
)
def test_vllm_gets_every_key_that_it_has(others):
    """A server of vLLM's that was profiled is started so again."""
    config = EAGLE3 | {"method": "draft_model"} | others
    assert vllm_config(config) == config


def test_vllm_gets_methods_that_forerun_lacks():
    for method in ("ngram_gpu", "dspark"):
        config = {"method": method, "num_speculative_tokens": 5}
        assert vllm_config(config) == config
    adaptive = {"method": "dspark", "num_speculative_tokens": 5, "enable_adaptive_verification": True}
    assert vllm_config(adaptive) == adaptive


def test_vllm_starts_with_no_mlp_speculator():
    """It reads the configuration, and its engine has no such method."""
    with pytest.raises(ConfigError, match=r"vLLM has no method .mlp_speculator.; may be ngram"):
        vllm_config(EAGLE3 | {"method": "mlp_speculator"})


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"draft_sample_method": "coupled"}, "draft_sample_method: got .coupled.; vLLM has greedy, probabilistic"),
        ({"quantization": "int8"}, "quantization: got .int8. for the drafter, which forerun's kernels compute"),
        ({"max_model_len": "1k"}, "max_model_len=.1k.; must be a whole number, at least 1, or null: give another"),
        ({"max_model_len": 8192}, "max_model_len: got 8192, the target has 4096; vLLM refuses a longer one"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens: got True"),
    ],
)
def test_values_that_vllm_lacks_are_refused(others, said):
    with pytest.raises(ConfigError, match=said):
        vllm_config(EAGLE3 | others, max_model_len=4096)


def test_blocks_are_verified_in_the_newer_runner_of_vllm_alone_and_a_note_says_so():
    notes = vllm_notes({"method": "suffix", "rejection_sample_method": "block"})
    assert any("verifies blocks in its newer model runner alone" in note for note in notes)
    assert not any("verifies blocks" in note for note in vllm_notes({"method": "eagle3"}))


@pytest.mark.parametrize(("method", "name"), [("pard", "draft_model"), ("peagle", "eagle3")])
def test_vllm_calls_drafters_of_one_pass_by_the_family_with_parallel_drafting(method, name):
    found = vllm_config(EAGLE3 | {"method": method})
    assert found == EAGLE3 | {"method": name, "parallel_drafting": True}


def test_vllm_chooses_no_lengths_by_itself():
    with pytest.raises(ConfigError, match="enable_adaptive_verification"):
        vllm_config(NGRAM | {"enable_adaptive_verification": True})


def test_a_drafter_that_ends_before_the_target_is_refused():
    short = EAGLE3 | {"max_model_len": 1024}
    assert vllm_config(short, max_model_len=1024) == short
    with pytest.raises(ConfigError, match="got 1024, the target has 4096"):
        vllm_config(short, max_model_len=4096)


def test_suffix_wants_a_package_and_a_length():
    suffix = {"method": "suffix", "num_speculative_tokens": 16}
    assert any("arctic-inference" in note for note in vllm_notes(suffix))
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        vllm_config({"method": "suffix"})


@pytest.mark.parametrize("method", ["ngram", "dflash"])
def test_sglang_counts_the_last_token_in_the_length_of_drafts_of_one_pass(method):
    found = sglang_options(EAGLE3 | {"method": method})
    assert found["speculative-num-draft-tokens"] == 4
    assert "speculative-num-steps" not in found


def test_other_look_ups_are_said_where_they_are_not_refused():
    with pytest.raises(ConfigError, match="prompt_lookup"):
        sglang_options(NGRAM | WINDOW)
    assert trtllm_config(NGRAM | WINDOW)["max_matching_ngram_size"] == 5
    with pytest.raises(ConfigError, match=r"prompt_lookup_max=.x.; must be a whole number"):
        trtllm_config(NGRAM | {"prompt_lookup_max": "x"})
    assert all(ngram_notes(NGRAM | WINDOW, system) for system in ("SGLang", "TensorRT-LLM"))
    assert not ngram_notes(EAGLE3, "SGLang")


def test_trtllm_has_each_decoding_type():
    assert set(TRTLLM_TYPES.values()) == schemas.TRTLLM_DECODING_TYPES


def test_mtp_has_its_length_for_old_and_new_trtllm():
    found = trtllm_config({"method": "mtp", "num_speculative_tokens": 2})
    assert found == {"decoding_type": "MTP", "max_draft_len": 2, "num_nextn_predict_layers": 2}


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


@pytest.mark.parametrize("translate", [sglang_options, trtllm_config])
def test_what_no_system_does_need_not_be_left_out(translate):
    assert translate(NGRAM | {"enable_adaptive_verification": False}) == translate(NGRAM)


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
    "schedule",
    [
        [[1, 2, 4], [3, 4, 2]],
        [[1, 2, 4], [6, 8, 2], [12, 16, 1]],
        [[3, 4, 2]],
        [[1, 2, 9], [3, 4, 4], [5, 5, 0]],
        [[1, 8, 4], [9, 99, 1]],
    ],
)
def test_trtllm_drafts_as_much_as_forerun_at_every_batch_size(schedule):
    config = NGRAM | {"num_speculative_tokens_per_batch_size": schedule}
    emitted = trtllm_config(config, max_num_seqs=16)["draft_len_schedule"]
    ours = FixedLength(num_speculative_tokens=4, schedule=tuple(map(tuple, schedule)))
    for size in range(1, 17):
        theirs = next((k for last, k in sorted(emitted.items()) if size <= last), 0)
        assert theirs == ours.draft_limit(size), size


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
    assert set(SGLANG_ALGORITHMS) == set(TRTLLM_TYPES) - {"pard"} | {"eagle"}
