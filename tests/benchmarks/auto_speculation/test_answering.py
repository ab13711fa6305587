"""One group's answers: texts, times and counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.auto_speculation.answering import answer
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import resolve_speculative
from forerun.errors import RequestError
from forerun.llm import LLM
from tests.bench.clocks import TickingClock
from tests.benchmarks.auto_speculation.conftest import NGRAM
from tests.engines import tiny_target


def tiny_llm(config=None, **settings):
    settings = EngineSettings(model="tiny", block_size=4, num_gpu_blocks_override=64, max_model_len=64, **settings)
    return LLM.from_target(tiny_target(), settings, resolve_speculative(config))


@pytest.fixture
def requests(workload):
    return [request for group in workload.groups for request in group]


def test_texts_are_the_engines_own_in_the_order_of_the_requests(requests):
    expected = tiny_llm().generate([one.prompt for one in requests], requests[0].sampling, use_tqdm=False)
    found = answer(tiny_llm(NGRAM, max_num_seqs=2), requests, salt="a")
    assert found.texts == [one.outputs[0].token_ids for one in expected]
    assert found.num_tokens == sum(map(len, found.texts))


def test_steps_that_compute_prompt_tokens_are_not_decoding(requests):
    found = answer(tiny_llm(), requests[:1], salt="a", clock=TickingClock())
    assert found.num_decode_tokens == found.num_tokens - 1
    assert found.seconds == found.num_tokens + 1  # one to submit, one a step
    assert found.decode_seconds == found.num_decode_tokens


def test_a_step_that_decodes_beside_a_prompt_counts_as_no_decoding(requests):
    short = replace(requests[0], sampling=replace(requests[0].sampling, max_tokens=4))
    found = answer(tiny_llm(max_num_seqs=2), [short, *requests[1:]], salt="a")
    assert found.num_decode_tokens < found.num_tokens - len(requests)


def test_counts_are_of_these_answers_alone(requests):
    llm = tiny_llm(NGRAM)
    first, second = (answer(llm, requests[:1], salt=salt).speculation for salt in ("a", "b"))
    assert first.num_draft_tokens
    assert (first.num_steps, first.num_draft_tokens) == (second.num_steps, second.num_draft_tokens)


def test_a_request_that_does_not_fit_is_an_error(requests):
    with pytest.raises(RequestError):
        answer(tiny_llm(), [replace(requests[0], prompt=[1] * 100)], salt="a")
