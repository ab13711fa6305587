"""A text that one engine began and another goes on with is the text of one engine, to the bit."""

from __future__ import annotations

import itertools

import pytest

from forerun import SamplingParams
from forerun.engine.client import EngineRequest
from forerun.errors import RequestError
from tests.contract.drafters import NGRAM
from tests.contract.test_contract import assert_nothing_is_held
from tests.engines import EOS, VOCAB_SIZE, native_target, tiny_llm

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
NUM_TOKENS = 11
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3}
KINDS = {
    "greedy": {"temperature": 0.0},
    "greedy with penalties": {"temperature": 0.0} | PENALTIES,
    "seeded": {"temperature": 1.0, "seed": 7},
    "seeded, truncated": {"temperature": 0.8, "seed": 8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "seeded with penalties": {"temperature": 1.0, "seed": 9} | PENALTIES,
    "seeded, at least eight": {"temperature": 1.0, "seed": 10, "min_tokens": 8, "stop_token_ids": list(range(40))},
    "seeded, biased": {"temperature": 1.0, "seed": 11, "logit_bias": {2: 1.5}},
}
ids = itertools.count()


def run(llm, prompt_ids, sampling, *, output_ids=()):
    """The tokens of a text with those written before, the text that is new, and the reason of its end."""
    request_id = f"continuation-{next(ids)}"
    request = EngineRequest(request_id=request_id, prompt_ids=prompt_ids, sampling=sampling, output_ids=output_ids)
    llm.engine.accept(request)
    llm.engine.submit(request_id)
    text, new = "", []
    while llm.engine.has_work:
        output = llm.engine.step()
        text += "".join(delta.text for delta in output.deltas)
        new += [token_id for delta in output.deltas for token_id in delta.token_ids]
        for finished in output.finished:
            (completion,) = finished.outputs
            assert completion.token_ids == [*output_ids, *new]
            assert finished.error is None
            return completion.token_ids, text, completion.finish_reason
    raise AssertionError("the request has ended")


@pytest.mark.parametrize(
    ("name", "drafting"), [*((name, None) for name in KINDS), ("greedy", NGRAM), ("seeded with penalties", NGRAM)]
)
def test_a_text_goes_on_after_any_of_its_tokens(name, drafting):
    llm, other = tiny_llm(drafting), tiny_llm()
    sampling = SamplingParams(**({"ignore_eos": True, "max_tokens": NUM_TOKENS} | KINDS[name]))
    whole, _, reason = run(other, PROMPT, sampling)
    for num_written in range(1, len(whole)):
        assert run(llm, PROMPT, sampling, output_ids=whole[:num_written])[::2] == (whole, reason)
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("name", [name for name in KINDS if "with penalties" not in name])
def test_tokens_may_come_as_part_of_the_prompt_where_no_rule_counts_them(name):
    """As a router sends them that knows of tokens only; it lowers max_tokens and min_tokens by their number."""
    llm = tiny_llm()
    settings = {"ignore_eos": True, "max_tokens": NUM_TOKENS, "repetition_penalty": 1.2} | KINDS[name]
    whole, _, reason = run(llm, PROMPT, SamplingParams(**settings))
    for num_written in range(1, len(whole)):
        rest = settings | {"max_tokens": NUM_TOKENS - num_written}
        if "min_tokens" in settings:
            rest["min_tokens"] = max(0, settings["min_tokens"] - num_written)
        found, _, end = run(llm, [*PROMPT, *whole[:num_written]], SamplingParams(**rest))
        assert (whole[:num_written] + found, end) == (whole, reason)


def test_presence_and_frequency_count_tokens_that_came_as_output_and_no_others():
    """Why a router that sends all tokens as the prompt loses them: this is no property of the noise."""
    llm = tiny_llm()
    settings = {"temperature": 0.0, "ignore_eos": True, "frequency_penalty": 2.0, "presence_penalty": 2.0}
    whole = run(llm, PROMPT, SamplingParams(**settings, max_tokens=30))[0]
    as_prompt = run(llm, [*PROMPT, *whole[:15]], SamplingParams(**settings, max_tokens=15))[0]
    assert whole[:15] + as_prompt != whole
    assert run(llm, PROMPT, SamplingParams(**settings, max_tokens=30), output_ids=whole[:15])[0] == whole


def test_on_the_native_kernels_too():
    llm = tiny_llm(NGRAM, target=native_target())
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, **PENALTIES)
    whole, text, reason = run(llm, PROMPT, sampling)
    for num_written in range(1, len(whole)):
        found, rest, end = run(llm, PROMPT, sampling, output_ids=whole[:num_written])
        assert (found, end) == (whole, reason)
        assert text.endswith(rest)


def test_a_stop_string_is_found_across_the_place_where_a_text_goes_on():
    llm = tiny_llm(target=native_target())
    settings = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "max_tokens": 30}
    whole, text, _ = run(llm, PROMPT, SamplingParams(**settings))
    stop = text[8:12]
    stopped, before, reason = run(llm, PROMPT, SamplingParams(**settings, stop=stop))
    assert reason == "stop"
    assert before == text[: text.index(stop)]
    for num_written in range(1, len(stopped)):
        found, rest, end = run(llm, PROMPT, SamplingParams(**settings, stop=stop), output_ids=whole[:num_written])
        assert (found, end) == (stopped, "stop")
        assert before.endswith(rest)


def test_of_a_text_that_goes_on_only_new_tokens_have_origins_and_log_probabilities():
    llm = tiny_llm()
    request = EngineRequest(
        request_id="a",
        prompt_ids=PROMPT,
        sampling=SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0),
        output_ids=[1, 2],
    )
    llm.engine.accept(request)
    llm.engine.submit("a")
    finished = []
    while not finished:
        finished = llm.engine.step().finished
    (completion,) = finished[0].outputs
    assert completion.token_ids[:2] == [1, 2]
    assert len(completion.origins) == len(completion.logprobs) == len(completion.token_ids) - 2 == 4
    assert all(token_id in row for token_id, row in zip(completion.token_ids[2:], completion.logprobs, strict=True))


def test_the_end_token_ends_a_text_that_goes_on():
    llm = tiny_llm()
    settings = {"temperature": 1.0, "seed": 4, "max_tokens": 100, "logit_bias": {EOS: 2.0}}
    whole, _, reason = run(llm, PROMPT, SamplingParams(**settings))
    assert reason == "stop"
    for num_written in range(1, len(whole)):
        assert run(llm, PROMPT, SamplingParams(**settings), output_ids=whole[:num_written])[::2] == (whole, "stop")


@pytest.mark.parametrize(
    ("output_ids", "settings", "hint"),
    [
        ([VOCAB_SIZE], {}, "output_ids: got token id 97"),
        ([1.5], {}, "output_ids: got .*must be a list of token ids"),
        ("text", {}, "output_ids: got 'text'"),
        (b"text", {}, "output_ids: got b'text'"),
        ([1] * 8, {"max_tokens": 8}, "must leave room"),
        ([1] * 113, {"max_tokens": None}, "must leave room"),
        ([1], {"n": 2, "temperature": 1.0}, "n > 1"),
        ([1], {"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_written_tokens_that_cannot_be_are_refused(output_ids, settings, hint):
    llm = tiny_llm()
    with pytest.raises(RequestError, match=hint):
        run(llm, PROMPT, SamplingParams(**settings), output_ids=output_ids)
    assert_nothing_is_held(llm)
