"""Replicas on a Ray of this machine: streams, routing, a replica that is killed under load.

python -m benchmarks.peers install ray
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import openai
import pytest

from forerun import LLM, SamplingParams
from tests.plan.profiles import fake_profile
from tests.slow.ray_services import MODEL, Load, command, environment, free_port, needs_two_cores, serving, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def service():
    with serving("--replicas", 2, "--disable-log-stats") as one:
        yield one


@needs_two_cores
def test_each_replica_streams_the_text_of_the_engine_alone(service):
    prompts = [f"Letter {n}: the sea is" for n in range(6)]
    alone = LLM(MODEL).generate(prompts, SamplingParams(max_tokens=24, temperature=0.8, seed=7))
    client = openai.OpenAI(base_url=service.url, api_key="none")
    for prompt, expected in zip(prompts, alone, strict=True):
        stream = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=24, temperature=0.8, seed=7, stream=True
        )
        chunks = [chunk.choices[0].text for chunk in stream if chunk.choices]
        assert "".join(chunks) == expected.outputs[0].text
        assert len(chunks) > 1
    answers = service.metric("vllm:request_success_total")
    assert set(answers) == {"0", "1"}
    assert all(value > 0 for value in answers.values())


@needs_two_cores
def test_an_answer_bears_the_id_of_its_request_once(service):
    client = openai.OpenAI(base_url=service.url, api_key="none")
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="a", max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine"


@needs_two_cores
@pytest.mark.parametrize("kind", ["text", "token ids", "chat"])
def test_prompts_of_one_beginning_are_read_once(service, kind):
    def ask(family, turn):
        words = f"{kind} {family} " * 120
        if kind == "chat":
            messages = [{"role": "user", "content": words}, {"role": "user", "content": f"Turn {turn}"}]
            given = {"model": MODEL, "messages": messages, "max_tokens": 1}
            status, body = service.ask("/v1/chat/completions", given)
            assert status == 200, body
        elif kind == "text":
            service.complete(words + f"turn {turn}", max_tokens=1)
        else:
            service.complete([100 + family] * 400 + [turn], max_tokens=1)

    before = looked_up(service)
    for turn in range(4):
        for family in range(3):
            ask(family, turn)
            time.sleep(0.1)  # the router hears of a request's end a little after its client
    assert hit_rate(service, since=before) > 0.6  # three of four, but for what comes after the last whole block


@needs_two_cores
def test_a_session_stays_with_its_replica(service):
    before = service.metric("vllm:request_success_total")
    for turn in range(6):
        service.complete(f"{turn} is a number", max_tokens=1, headers=[("x-session-id", "one")])
    after = service.metric("vllm:request_success_total")
    served = {engine: value - before.get(engine, 0) for engine, value in after.items()}
    assert [count for count in served.values() if count] == [6]


@needs_two_cores
def test_round_robin_reads_more_than_prefix_routing():
    with serving("--replicas", 2, "--routing", "round-robin", "--disable-log-stats") as one:
        for turn in range(3):
            for family in range(3):
                one.complete([100 + family] * 400 + [turn], max_tokens=1)
        assert hit_rate(one) < 0.5


@needs_two_cores
def test_a_replica_that_is_killed_fails_its_own_requests_only_and_is_replaced(service):
    with Load(service) as load:
        wait_until(lambda: load.served >= 8, seconds=60, what="no load")
        victim, survivor = service.replicas()
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(
            lambda: len([one for one in service.replicas() if one.pid != victim.pid]) == 2,
            seconds=60,
            what="the replica is not replaced",
        )
        wait_until(lambda: len(service.metric("vllm:num_requests_running")) == 2, seconds=90, what="not healthy again")
        served = load.served
        wait_until(lambda: load.served >= served + 8, seconds=60, what="no load afterwards")
    assert len(load.failures) <= 4  # as many as there are clients: each had one request under way
    assert all(status in (0, 200, 500, 503) for status, _ in load.failures), load.failures
    assert survivor.is_running()


@needs_two_cores
def test_a_replica_that_hangs_is_left_out_of_the_metrics(service):
    wait_until(lambda: len(service.replicas()) == 2, seconds=60, what="no two replicas")
    hanging = service.replicas()[0]
    hanging.suspend()
    try:
        answered = []

        def reaches_the_other():
            try:
                status, body = service.ask("/metrics", timeout=8)
            except TimeoutError:  # it was sent to the one that hangs
                return False
            answered.append(status)
            return status == 200 and len(set(re.findall(r'engine="(\d+)"', body))) == 1

        wait_until(reaches_the_other, seconds=60, what="no metrics of the other replica")
    finally:
        hanging.resume()
    assert set(answered) == {200}


def looked_up(service):
    """Prompt tokens that were looked up in prefix caches, and those that were found."""
    return [sum(service.metric(f"vllm:prefix_cache_{name}_total").values()) for name in ("queries", "hits")]


def hit_rate(service, since=(0.0, 0.0)):
    """The share that was found since a count."""
    asked, found = looked_up(service)
    return (found - since[1]) / (asked - since[0])


@needs_two_cores
def test_the_planner_adds_a_replica_under_load_and_takes_it_away_afterwards(tmp_path):
    fake_profile(tmp_path / "profile")
    # a step alone takes the profile's engine 4.06 ms: two of them come nearer to this than one at any rate
    scaling = ["--scaling-profile", tmp_path / "profile", "--sla", "tpot=4.1ms", "--scaling-interval", 3]
    # replicas draft as planned, here nothing: the profile has no "auto"
    drafts = ["--no-speculation", "--scaling-predictor", "constant"]
    words = ["--replicas", 1, "--max-replicas", 2, "--disable-log-stats", *drafts, *scaling]
    with serving(*words) as one:
        assert len(one.replicas()) == 1
        with Load(one) as load:
            wait_until(lambda: len(one.metric("vllm:num_requests_running")) == 2, seconds=120, what="no second replica")
            served = load.served
            wait_until(lambda: load.served >= served + 8, seconds=60, what="no load")
        assert load.failures == []
        wait_until(lambda: len(one.replicas()) == 1, seconds=120, what="two replicas without load")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "1000"], "may be 1 to"),
        (["--replicas", "1", "--max-model-len", "0"], "max_model_len"),
    ],
)
def test_a_service_that_cannot_start_says_why_and_leaves_nothing(words, message):
    done = subprocess.run(
        command("serve", MODEL, "--port", free_port(), *words),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
