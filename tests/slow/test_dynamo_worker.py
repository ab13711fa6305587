"""Dynamo's frontend with two workers of the default model: the offline engine's text, affinity, and a worker's death.

Needs an environment of its own: python -m benchmarks.peers install dynamo_worker.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

import pytest
from openai import OpenAI

from benchmarks.dynamo import ENVIRONMENT, NAME, dynamo_serving
from forerun import LLM, SamplingParams
from tests.slow.environments import interpreter_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "smollm2-135m"
PROMPT = "Once upon a time, in a land far away, there lived"
ARGUMENTS = ("--max-model-len=2048",)
NUM_TOKENS = 160
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.3}


@pytest.fixture(scope="module")
def offline():
    return LLM(MODEL, max_model_len=2048)


@pytest.fixture(scope="module")
def dynamo(tmp_path_factory):
    python = interpreter_of(ENVIRONMENT)
    folder = tmp_path_factory.mktemp("dynamo")
    with dynamo_serving(python, MODEL, *ARGUMENTS, folder=folder, num_workers=2) as deployment:
        yield deployment


@pytest.fixture
def client(dynamo):
    """A client of a frontend that has two workers again, whatever died before."""
    dynamo.workers = [worker for worker in dynamo.workers if worker.process.is_running()]
    while len(dynamo.workers) < 2:
        dynamo.add_worker()
        time.sleep(2)  # until the frontend has found it
    return OpenAI(base_url=f"{dynamo.url}/v1", api_key="none", max_retries=0, timeout=120)


def text_offline(llm, prompt, **settings):
    return llm.generate([prompt], SamplingParams(**settings), use_tqdm=False)[0].outputs[0].text


def split(settings):
    """Settings that OpenAI's client knows, and those that it takes as extra fields."""
    extra = {
        name: settings[name] for name in ("min_tokens", "ignore_eos", "repetition_penalty", "top_k") if name in settings
    }
    return {name: value for name, value in settings.items() if name not in extra} | {"extra_body": extra}


def post(url, path, body):
    """(status, answer) of a request that a client of OpenAI's would not send."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 5, "top_p": 0.9},
        {"temperature": 1.0, "seed": 6, "stop": ["\n\n", "and the"], "min_tokens": 8},
        {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.2},
    ],
    ids=["greedy", "seeded", "stop strings", "logprobs"],
)
def test_the_text_is_the_offline_engines(client, offline, settings):
    settings = {"max_tokens": 60} | settings
    answer = client.completions.create(model=NAME, prompt=PROMPT, **split(settings)).choices[0]
    expected = offline.generate([PROMPT], SamplingParams(**settings), use_tqdm=False)[0].outputs[0]
    assert answer.text == expected.text
    assert answer.finish_reason == expected.finish_reason
    if "logprobs" in settings:
        found = [row[token_id].logprob for row, token_id in zip(expected.logprobs, expected.token_ids, strict=True)]
        assert answer.logprobs.token_logprobs == pytest.approx(found, abs=1e-5)


def test_a_chat_that_ends_by_itself_is_the_offline_engines(client, offline):
    messages = [{"role": "user", "content": "Name three colours."}]
    answer = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=200).choices[0]
    expected = offline.chat(messages, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)[0].outputs[0]
    assert answer.message.content == expected.text
    assert answer.finish_reason == expected.finish_reason


def test_a_text_that_must_match_a_schema_is_the_offline_engines(client, offline):
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}
    messages = [{"role": "user", "content": "Which colour has the sea?"}]
    answer = client.chat.completions.create(
        model=NAME, messages=messages, temperature=0, max_tokens=60, response_format=form
    ).choices[0]
    sampling = SamplingParams(temperature=0, max_tokens=60, structured_outputs={"json": schema})
    assert answer.message.content == offline.chat(messages, sampling, use_tqdm=False)[0].outputs[0].text
    assert json.loads(answer.message.content)["colour"] in ("red", "blue")


def test_requests_with_one_beginning_go_to_one_worker(client, dynamo):
    keeper = " ".join(["The old lighthouse keeper walked along the shore every morning, counting ships."] * 12)
    baker = " ".join(["In the mountains there is a small village where everyone bakes bread at dawn."] * 12)
    seen = {keeper: set(), baker: set()}
    for number in range(4):
        for prompt, workers in seen.items():
            body = {"model": NAME, "prompt": prompt + " And then", "max_tokens": 4, "temperature": 0}
            status, answer = post(dynamo.url, "/v1/completions", body | {"nvext": {"extra_fields": ["worker_id"]}})
            assert status == 200
            workers.add(answer["nvext"]["worker_id"]["decode_worker_id"])
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (0 if number == 0 else (answer["usage"]["prompt_tokens"] - 1) // 16 * 16)
            time.sleep(0.2)  # until the router has heard of it
    assert all(len(workers) == 1 for workers in seen.values())
    assert seen[keeper] != seen[baker]


def test_a_cache_salt_is_kept_apart_and_routed_alike(client, dynamo):
    prompt = " ".join(["A ship without a captain crossed the narrow strait in the third week of autumn."] * 12)
    found = []
    for salt in ("mine", "mine", "yours"):
        body = {"model": NAME, "prompt": prompt, "max_tokens": 4, "nvext": {"cache_salt": salt}}
        found.append(post(dynamo.url, "/v1/completions", body)[1]["usage"]["prompt_tokens_details"]["cached_tokens"])
        time.sleep(0.2)
    assert found[0] == found[2] == 0 < found[1]


@pytest.mark.parametrize(
    ("change", "hint"),
    [({"n": 2}, "sampling_options.n: got 2"), ({"prompt": "word " * 3000}, "below max_model_len (2048)")],
)
def test_what_is_not_served_is_the_clients_mistake_and_said_so(client, dynamo, change, hint):
    status, answer = post(dynamo.url, "/v1/completions", {"model": NAME, "prompt": "a", "max_tokens": 4} | change)
    assert status == 400
    assert hint in answer["message"]


def test_a_client_that_leaves_ends_its_request(client, dynamo):
    stream = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert sum(worker.num_running() for worker in dynamo.workers) == 1
    stream.close()
    end = time.monotonic() + 5
    while sum(worker.num_running() for worker in dynamo.workers):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("num_chunks", [1, 5, 20])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 11, "top_p": 0.95},
        {"temperature": 0.9, "seed": 12} | PENALTIES,
        {"temperature": 1.0, "seed": 13, "min_tokens": 100, "stop": [". "]},
    ],
    ids=["greedy", "seeded", "penalties", "stop strings"],
)
def test_a_text_whose_worker_is_killed_is_the_undisturbed_one(client, dynamo, offline, settings, num_chunks):
    settings = {"max_tokens": NUM_TOKENS, "ignore_eos": "stop" not in settings} | settings
    expected = offline.generate([PROMPT], SamplingParams(**settings), use_tqdm=False)[0].outputs[0]
    stream = client.completions.create(model=NAME, prompt=PROMPT, stream=True, **split(settings))
    text, reason = "", None
    for number, chunk in enumerate(stream, 1):
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
        if number == num_chunks:
            (busy,) = (worker for worker in dynamo.workers if worker.num_running())
            busy.kill()
            assert len(text) < len(expected.text)
    assert text == expected.text
    assert reason == expected.finish_reason


def test_other_requests_do_not_notice_a_workers_end(client, dynamo, offline):
    """Eight streams over two workers, one of which is killed: no text differs and none is cut."""
    settings = {"max_tokens": 80, "temperature": 0.8, "ignore_eos": True}
    prompts = [
        f"{PROMPT} {name}" for name in ("a king", "a queen", "a fox", "a bear", "a fish", "a bird", "a cat", "a dog")
    ]
    expected = [text_offline(offline, prompt, **settings, seed=seed) for seed, prompt in enumerate(prompts)]
    streams = [
        client.completions.create(model=NAME, prompt=prompt, stream=True, seed=seed, **split(settings))
        for seed, prompt in enumerate(prompts)
    ]
    texts = [next(iter(stream)).choices[0].text for stream in streams]
    max(dynamo.workers, key=lambda worker: worker.num_running()).kill()
    for number, stream in enumerate(streams):
        texts[number] += "".join(choice.text for chunk in stream for choice in chunk.choices)
    assert texts == expected


def test_a_worker_that_is_told_to_stop_leaves_its_streams_to_the_other(client, dynamo, offline):
    settings = {"max_tokens": NUM_TOKENS, "temperature": 0.9, "seed": 21, "ignore_eos": True}
    stream = client.completions.create(model=NAME, prompt=PROMPT, stream=True, **split(settings))
    text = next(iter(stream)).choices[0].text
    (busy,) = (worker for worker in dynamo.workers if worker.num_running())
    busy.process.terminate()
    text += "".join(choice.text for chunk in stream for choice in chunk.choices)
    assert text == text_offline(offline, PROMPT, **settings)
    assert busy.process.wait(60) == 0


def test_metrics_are_those_that_dynamos_planner_reads(client, dynamo):
    text = "\n".join(worker.metrics() for worker in dynamo.workers)
    for name in (
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_drafts_total",
        "dynamo_component_total_blocks",
    ):
        assert f"\n{name}{{" in text
