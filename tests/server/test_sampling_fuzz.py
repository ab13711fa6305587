"""Any mixture of sampling options on any drafter: answered, the same text as without drafts, nothing left behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.drafters import CASES
from tests.server.served import CHAT, PROMPT, chat_llm, served
from tests.server.test_load import until

DRAFTERS = ("ngram", "suffix-tree", "draft-model", "eagle3-dynamic-tree", "hybrid-self")
NUM_CLIENTS = 4


def some(*values):
    """One of the values; the first means that the field is left out."""
    return st.sampled_from((None, None, *values))


def _fits(body):
    """Whether no two options contradict each other, which would only be refused."""
    return not ((body["ignore_eos"] and body["response_format"]) or (body["min_tokens"] or 0) > body["max_tokens"])


OPTIONS = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from([PROMPT, "abc abc abc", [70, 71, 72] * 5, ["a", "he he he"]]),
        "max_tokens": st.sampled_from([1, 7, 24]),
        "temperature": st.sampled_from([0, 0, 0, 0.7, 2.0]),
        "n": some(2, 3),
        "seed": some(0, -5, 2**62),
        "top_k": some(1, 5, 10_000),
        "top_p": some(0.01, 0.5),
        "min_p": some(0.3, 1.0),
        "presence_penalty": some(2.0, -2.0),
        "frequency_penalty": some(2.0, -2.0),
        "repetition_penalty": some(1.7, 0.1),
        "logit_bias": some({"70": 100, "71": -100}, {"5": 100}, {str(i): -100 for i in range(200)}),
        "bad_words": some(["he", "l"], ["lo h", "abc"]),
        "allowed_token_ids": some([70, 71, 78, 259], [2, 70], list(range(3, 260))),
        "stop": some("l", ["C", "he", "\ufffd"]),
        "stop_token_ids": some([70], [5, 2]),
        "include_stop_str_in_output": some(True),
        "min_tokens": some(1, 7),
        "ignore_eos": some(True),
        "logprobs": some(0, 5),
        "echo": some(True),
        "return_token_ids": some(True),
        "stream": st.booleans(),
        "response_format": some({"type": "json_object"}, {"type": "regex", "regex": "(ab|he)*[0-9]{2,5}"}),
        "forerun": some({"num_speculative_tokens": 1}, {"num_speculative_tokens": 0}, {"origins": True}, {"speculation": "on"}),
        "cache_salt": some("x"),
    }
).filter(_fits)  # fmt: skip


@pytest.fixture(scope="module", params=DRAFTERS)
def server(request):
    llm = chat_llm(CASES[request.param], num_gpu_blocks_override=100, max_num_seqs=8)
    with served(llm) as server:
        yield server


def answered(server, body):
    """The completions, each as (text, why it ended, token ids), or the error."""
    if not body["stream"]:
        status, _, answer = server.send("POST", "/v1/completions", body)
        assert status in (200, 400), answer
        return [reported(choice) for choice in answer["choices"]] if status == 200 else answer["error"]
    status, _, answer = server.send("POST", "/v1/completions", body)
    if status != 200:
        assert status == 400, answer
        return answer["error"]
    parts = {}
    for event in server.events(answer):
        if "error" in event:
            assert event["error"]["type"] == "invalid_request_error", event
            return event["error"]
        (choice,) = event["choices"]
        text, reason, ids = parts.get(choice["index"], ("", None, []))
        parts[choice["index"]] = (
            text + choice["text"],
            choice["finish_reason"] or reason,
            ids + (choice.get("token_ids") or []),
        )
    return [parts[index] for index in sorted(parts)]


def reported(choice):
    return choice["text"], choice["finish_reason"], choice.get("token_ids") or []


def test_any_mixture_is_answered_as_without_drafts(server):
    statuses = set()

    @settings(max_examples=10, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(OPTIONS, min_size=NUM_CLIENTS, max_size=NUM_CLIENTS))
    def ask(bodies):
        with_drafts = list(threads.map(lambda body: answered(server, body), bodies))
        plain = [body | {"stream": False, "forerun": {"speculation": "off"}} for body in bodies]
        without = list(threads.map(lambda body: answered(server, body), plain))
        for body, one, other in zip(bodies, with_drafts, without, strict=True):
            statuses.add(type(one))
            assert type(one) is type(other), (body, one, other)
            if body["temperature"] == 0 or isinstance(one, dict):
                assert one == other, body

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        ask()
    assert list in statuses
    until(lambda: server.model.admission.num_inside == 0)
    pool = server.llm.engine.parts.pool
    until(lambda: pool.num_free == pool.num_blocks)
    assert server.send("GET", "/health")[0] == 200


def test_the_largest_numbers_that_a_client_may_send_cost_no_other_client_its_text():
    other = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
    largest = {"messages": CHAT, "min_tokens": 2**31 - 1, "top_k": 2**31 - 1}
    with served(chat_llm(CASES["ngram"], device_step=True)) as server, ThreadPoolExecutor(1) as threads:
        running = threads.submit(server.post, "/v1/completions", other)
        until(lambda: server.model.admission.num_inside == 1)
        server.post("/v1/chat/completions", largest)
        assert running.result()["usage"]["completion_tokens"] == 100
