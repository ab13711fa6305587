"""Sampling values are refused before anything runs, each in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from forerun import SamplingParams
from forerun.errors import RequestError, UnknownKeyError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("prompt_logprobs", 1.5),
        ("seed", "x"),
        ("stop", 5),
        ("stop", [5]),
        ("stop", ""),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["5"]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", [2**31]),
        ("allowed_token_ids", [True]),
        ("logit_bias", [1]),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", {1: 3.4e38}),
        ("logit_bias", {1: -1e39}),
        ("logit_bias", {1: True}),
        ("logits_processors", print),
        ("logits_processors", [5]),
        ("extra_args", "x"),
        ("prediction", 5),
        ("prediction", ["text"]),
        ("prediction", [True]),
        ("prediction", b"text"),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_line(name, value):
    with pytest.raises(RequestError, match=f"^{name}: got ") as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bias", [1e30, -3.4e38, float("-inf")])
def test_a_bias_may_be_as_large_as_can_be_added_to_a_logit(bias):
    assert SamplingParams(logit_bias={1: bias}).logit_bias == {1: bias}


def test_an_unknown_keyword_names_the_one_that_was_meant():
    with pytest.raises(UnknownKeyError, match="did you mean 'temperature'"):
        SamplingParams(temprature=1.0)


@pytest.mark.parametrize("seed", [-1, np.int64(-1), None])
def test_a_seed_of_minus_one_is_none(seed):
    assert SamplingParams(seed=seed).seed is None
    assert SamplingParams(seed=-2).seed == -2


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("given", [[np.int64(3), 4], (np.uint8(3), np.int32(4))])
def test_token_ids_of_numpy_become_pythons_own(name, given):
    assert json.dumps(getattr(SamplingParams(**{name: given}), name)) == "[3, 4]"


@pytest.mark.parametrize("speculation", ["on", 3, {"num_speculative_tokens": -1}, {"num_speculative_tokens": 1.5}])
def test_speculation_must_be_off_or_a_number_of_tokens(speculation):
    with pytest.raises(RequestError, match="speculation"):
        SamplingParams(speculation=speculation)


def test_speculation_off_is_no_tokens():
    assert SamplingParams(speculation="off").request_speculation.num_speculative_tokens == 0
    assert SamplingParams().request_speculation.num_speculative_tokens is None


@pytest.mark.parametrize(
    ("extra_args", "hint"),
    [
        ({"kv_transfer_param": {}}, "did you mean 'kv_transfer_params'"),
        ({"kv_transfer_params": [1]}, "kv_transfer_params: got"),
        ({"kv_transfer_params": {"include_output_token": True}}, "did you mean 'include_output_tokens'"),
        ({"kv_transfer_params": {"include_output_tokens": 1}}, "must be True or False"),
        ({"kv_transfer_params": {"hidden_states_path": ""}}, "must be the path of a file"),
        ({"kv_transfer_params": {"hidden_states_path": 5}}, "must be the path of a file"),
    ],
)
def test_extra_args_are_what_hidden_states_need(extra_args, hint):
    with pytest.raises((RequestError, UnknownKeyError), match=hint):
        SamplingParams(extra_args=extra_args)


def test_without_extra_args_nothing_is_asked_of_files():
    assert SamplingParams().kv_transfer is None
    assert SamplingParams(extra_args={"kv_transfer_params": None}).kv_transfer is None
    wanted = {"kv_transfer_params": {"include_output_tokens": True}}
    assert SamplingParams(extra_args=wanted).kv_transfer.include_output_tokens


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_a_clone_is_equal_and_another():
    params = SamplingParams(temperature=0, stop=["a"], structured_outputs={"choice": ["a", "b"]})
    assert params.clone() == params
    assert params.clone() is not params
