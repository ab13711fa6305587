"""Every field of a request is served, left to the frontend, or refused; a broken stream's text goes on as it was."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun import SamplingParams
from forerun.deploy.dynamo.requests import as_written, seed_of, translate, wants_nothing
from forerun.errors import RequestError
from tests.deploy.dynamo.sent import PROMPT, sent


def translated(*args, **kwargs):
    return translate(sent(*args, **kwargs), request_id="some-id", seed=0, defaults={})


def test_a_request_that_asks_for_nothing_has_the_defaults():
    request = translated()
    assert request.prompt_ids == PROMPT
    assert request.cache_salt is None
    assert request.sampling == SamplingParams(max_tokens=None, detokenize=False, seed=seed_of("some-id", 0))


def test_defaults_fill_in_what_a_request_leaves_out_and_nothing_else():
    defaults = {"temperature": 0.5, "top_p": 0.75, "max_tokens": 7}
    found = translate(sent(sampling={"top_p": 0.25}), request_id="some-id", seed=0, defaults=defaults).sampling
    assert (found.temperature, found.top_p, found.max_tokens) == (0.5, 0.25, 7)
    asked = sent(sampling={"seed": 3}, stop={"max_tokens": 9})
    assert translate(asked, request_id="some-id", seed=0, defaults=defaults).sampling.max_tokens == 9


def test_each_setting_comes_through():
    settings = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "temperature": 0.25}
    settings |= {"top_p": 0.5, "top_k": 7, "min_p": 0.125, "seed": -4}
    request = translated(
        stop={"max_tokens": 9, "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [8], "stop": ["a"]},
        sampling=settings,
        output={"logprobs": 2, "skip_special_tokens": False},
        routing={"cache_salt": "mine", "priority_jump": 1.0},
        extra_args={"nvext": {"cache_salt": "mine"}},
    )
    rest = {"max_tokens": 9, "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [8], "logprobs": 2}
    assert request.sampling == SamplingParams(**settings, **rest, detokenize=False)
    assert request.cache_salt == "mine"


def test_hidden_and_visible_stop_tokens_end_the_text():
    stop = {"stop_token_ids": [5], "stop_token_ids_hidden": [2, 0], "stop_token_ids_visible": [7, 5]}
    assert translated(stop=stop).sampling.stop_token_ids == [0, 2, 5, 7]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"json": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"regex": "a+", "backend": "guidance"}, {"regex": "a+"}),
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"grammar": 'start: "a"', "json": None}, {"grammar": 'start: "a"'}),
    ],
)
def test_guided_decoding_is_what_the_text_must_match(given, expected):
    found = translated(sampling={"guided_decoding": given}).sampling.constraint
    assert found == SamplingParams(structured_outputs=expected).constraint
    assert found.kind == next(iter(expected))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sampling": {"n": 2}}, "sampling_options.n"),
        ({"sampling": {"best_of": 3}}, "sampling_options.best_of"),
        ({"sampling": {"use_beam_search": True}}, "sampling_options.use_beam_search"),
        ({"sampling": {"length_penalty": 2.0}}, "sampling_options.length_penalty"),
        ({"sampling": {"bad_words_token_ids": [[1]]}}, "sampling_options.bad_words_token_ids"),
        ({"sampling": {"sharpness": 3}}, "sampling_options.sharpness"),
        ({"sampling": {"guided_decoding": {"regex": "a", "backend": "xgrammar"}}}, "guided_decoding.backend"),
        ({"sampling": {"guided_decoding": {"regex": "a", "depth": 3}}}, "guided_decoding.depth"),
        ({"stop": {"max_thinking_tokens": 7}}, "stop_conditions.max_thinking_tokens"),
        ({"output": {"prompt_logprobs": 1}}, "output_options.prompt_logprobs"),
        ({"output": {"hidden_states": True}}, "output_options.hidden_states"),
        ({"routing": {"lora_name": "mine"}}, "routing.lora_name"),
        ({"routing": {"priority": 3}}, "routing.priority"),
        ({"routing": {"dp_rank": 1}}, "routing.dp_rank"),
        ({"extra_args": {"kv_transfer_params": {"a": 1}}}, "extra_args.kv_transfer_params"),
        ({"multi_modal_data": {"image_url": [1]}}, "request.multi_modal_data"),
        ({"prefill_result": {"disaggregated_params": {}}}, "request.prefill_result"),
        ({"require_reasoning": True}, "request.require_reasoning"),
        ({"something_new": 1}, "request.something_new"),
        ({"sampling_options": [1]}, "sampling_options: got"),
        ({"sampling": {"temperature": -1.0}}, "temperature: got -1.0"),
        ({"stop": {"max_tokens": 2, "min_tokens": 3}}, "min_tokens"),
    ],
)
def test_what_is_not_served_is_refused_by_name(change, field):
    with pytest.raises(RequestError, match=field):
        translated(**change)


def test_fields_of_the_frontend_are_left_to_it():
    frontends = {"jail_seed": {"text": "a"}, "migration_link": {"span_id": "a"}, "router": {"ttft_target": 1.0}}
    plain = translated()
    assert translated(**frontends, request_timestamp_ms=1.5, _HEALTH_CHECK=True, annotations=["token_ids"]) == plain


def test_dynamos_health_probe_is_a_request():
    probe = {
        "token_ids": [0],
        "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0},
        "_HEALTH_CHECK": True,
    }
    assert translate(probe, request_id="probe", seed=0, defaults={}).sampling.max_tokens == 1


@given(st.floats(0, 2, width=32))
def test_a_number_is_what_it_was_before_it_had_32_bits(value):
    written = as_written(value)
    assert np.float32(written) == np.float32(value)
    assert len(json.dumps(written)) <= len(json.dumps(value))


@given(st.integers(0, 2000).map(lambda thousandths: thousandths / 1000))
def test_a_setting_with_three_decimals_survives_the_frontend(value):
    assert as_written(float(np.float32(value))) == value


def test_a_request_without_a_seed_has_the_same_one_on_each_worker_and_another_in_each_request():
    seeds = {seed_of(request_id, seed) for request_id in ("a", "b") for seed in (0, 1)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert translated().sampling.seed == translated([*PROMPT, 7]).sampling.seed


def test_a_resumed_request_is_the_one_that_the_client_sent():
    settings = {"presence_penalty": 1.0, "seed": 3}
    first = translated(stop={"max_tokens": 20, "min_tokens": 9}, sampling=settings)
    moved = translated([*PROMPT, 40, 41, 42], stop={"max_tokens": 17, "min_tokens": 6}, sampling=settings)
    assert moved.resumed(len(PROMPT)) == (first, [40, 41, 42])
    assert first.resumed(len(PROMPT)) == (first, [])


@pytest.mark.parametrize("limit", [None, 20])
def test_limits_that_are_off_stay_off_in_a_resumed_request(limit):
    request, written = translated([*PROMPT, 40], stop={"max_tokens": limit}).resumed(len(PROMPT))
    assert (request.sampling.max_tokens, request.sampling.min_tokens) == (limit and limit + 1, 0)
    assert written == [40]


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 2.0}, False),
    ],
)
def test_only_some_penalties_depend_on_where_the_prompt_ends(settings, counts):
    assert translated(sampling=settings).counts_written_tokens == counts


def test_a_stream_that_broke_after_its_last_token_wants_nothing():
    assert wants_nothing(sent(stop={"max_tokens": 0}))
    assert not wants_nothing(sent(stop={"max_tokens": 1}))
    assert not wants_nothing(sent())
