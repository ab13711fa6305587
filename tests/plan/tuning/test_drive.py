"""Driving an engine: who is sent when, and from when latencies count; in virtual time."""

from __future__ import annotations

import pytest

from forerun.core.sampling_params import SamplingParams
from forerun.engine.simulation import SimulationSettings, simulated_engine
from forerun.errors import RequestError
from forerun.executor.simulated import VirtualClock
from forerun.plan.tuning.drive import OfferedRequest, drive

STEP = 0.01


def request(arrival=0.0, *, tokens=4, prompt=(1, 2, 3)):
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
    return OfferedRequest(prompt_ids=list(prompt), sampling=sampling, arrival=arrival)


def run(requests, *, concurrency=None, **options):
    clock = VirtualClock(now=5.0)
    engine = simulated_engine(SimulationSettings(step_seconds=lambda _: STEP), clock=clock)
    return drive(engine, requests, concurrency=concurrency, salt="s", clock=clock, wait=clock.advance, **options)


def test_a_lone_request_takes_a_step_per_token():
    (times,) = run([request()]).times
    assert (times.ttft, times.e2el) == pytest.approx((STEP, 4 * STEP))
    assert (times.num_tokens, times.num_chunks) == (4, 4)


def test_time_passes_until_the_next_arrival():
    found = run([request(1.0), request(9.0)])
    assert [times.e2el for times in found.times] == pytest.approx([4 * STEP] * 2)
    assert found.seconds == pytest.approx(9.0 + 4 * STEP)


def test_a_request_that_arrives_during_a_step_waits_for_its_end():
    late = run([request(0.0), request(STEP / 2)]).times[1]
    assert late.ttft == pytest.approx(1.5 * STEP)


def test_clients_send_their_next_request_when_the_last_one_is_answered():
    found = run([request()] * 6, concurrency=2)
    assert found.seconds == pytest.approx(3 * 4 * STEP)
    assert all(times.e2el == pytest.approx(4 * STEP) for times in found.times)


def test_answers_are_in_the_order_of_the_requests():
    found = run([request(tokens=9), request(tokens=2), request(tokens=5)], concurrency=3)
    assert [len(answer) for answer in found.answers] == [9, 2, 5]


def test_the_end_of_each_request_and_every_step_is_told():
    ended, steps = [], []
    run([request(tokens=5), request(tokens=2)], concurrency=2, on_end=ended.append, on_step=steps.append)
    assert ended == [1, 0]
    assert steps == pytest.approx([STEP] * 5)


def test_a_request_that_does_not_fit_is_an_error():
    with pytest.raises(RequestError):
        run([request(prompt=[1] * 10_000)])
