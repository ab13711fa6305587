"""Arrival times by rate, seed, burstiness and ramp; sending at them, with fake requests instead of a network."""

from __future__ import annotations

import asyncio
import gc
import math
import time

import numpy as np
import pytest

from forerun.bench.load.answer import Answer, Chunk, LoadRequest
from forerun.bench.load.sender import Sender, draw_arrivals, draw_arrivals_within, rates
from forerun.bench.load.workload import Traffic
from forerun.errors import ConfigError

REQUESTS = [LoadRequest(str(number), 1) for number in range(6)]


def draw(count=1000, seed=0, **settings):
    return draw_arrivals(Traffic(**settings), count, np.random.default_rng(seed))


def test_without_a_rate_all_come_at_once():
    assert draw(3).tolist() == [0, 0, 0]


def test_at_a_rate_the_last_comes_at_count_by_rate_whatever_the_seed():
    assert [draw(100, seed, request_rate=8)[-1] for seed in range(3)] == pytest.approx([12.5] * 3)


def test_a_seed_gives_the_same_arrivals_and_another_seed_others():
    assert draw(seed=1, request_rate=2).tolist() == draw(seed=1, request_rate=2).tolist()
    assert draw(seed=1, request_rate=2).tolist() != draw(seed=2, request_rate=2).tolist()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_a_gamma_distribution_of_that_shape(burstiness):
    gaps = np.diff(draw(20000, request_rate=5, burstiness=burstiness))
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_gaps_that_are_all_next_to_nothing_are_moments_all_the_same():
    """Of a distribution without end: a clock that waited for what is no number would wait for ever."""
    times = [draw(10, seed, request_rate=2, burstiness=1e-4) for seed in range(20)]
    assert all(np.isfinite(one).all() and (np.diff(one) >= 0).all() for one in times)
    assert {round(one[-1], 9) for one in times} == {0.0, 5.0}


def test_infinite_burstiness_is_a_fixed_beat():
    assert draw(4, request_rate=2, burstiness=math.inf).tolist() == [0.5, 1, 1.5, 2]


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.0), ("exponential", 3.0)], ids=["linear", "exponential"])
def test_a_ramp_goes_from_start_to_end(strategy, middle):
    traffic = Traffic(ramp_up_strategy=strategy, ramp_up_start_rps=1, ramp_up_end_rps=9)
    assert rates(traffic, 3).tolist() == pytest.approx([1, middle, 9])


def test_a_ramp_has_as_many_gaps_of_each_length_as_its_rates_say():
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 4, "burstiness": math.inf}
    assert draw(4, **ramp).tolist() == pytest.approx(np.cumsum([1, 1 / 2, 1 / 3, 1 / 4]).tolist())


def test_a_duration_is_filled_at_the_rate_and_not_passed():
    times = draw_arrivals_within(Traffic(request_rate=7, duration=10), 10, np.random.default_rng(0))
    assert (len(times), times[-1]) == (70, pytest.approx(10))


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_over_a_duration_ends_with_it(strategy):
    traffic = Traffic(
        ramp_up_strategy=strategy, ramp_up_start_rps=1, ramp_up_end_rps=9, burstiness=math.inf, duration=20
    )
    times = draw_arrivals_within(traffic, 20, np.random.default_rng(0))
    assert 19 < times[-1] <= 20
    assert 1 / (times[-1] - times[-2]) == pytest.approx(9, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"request_rate": 0}, "request_rate: got 0; must be more than 0"),
        ({"burstiness": -1}, "burstiness: got -1; must be more than 0"),
        ({"burstiness": 2}, "burstiness: got 2, and there is no rate"),
        ({"max_concurrency": 0}, "max_concurrency: got 0; must be 1 or more"),
        ({"num_warmups": -1}, "num_warmups: got -1; must be 0 or more"),
        ({"duration": 5}, "duration: got no limit"),
        ({"duration": 1e9, "request_rate": 1e9}, "duration: got 1e.09 s at 1e.09 requests per second; may be 1e.08"),
        ({"request_rate": 1e-320}, "request_rate: got 9.99989e-321, at which no request would ever be sent"),
        ({"duration": math.inf, "max_concurrency": 1}, "duration: got inf"),
        ({"ramp_up_start_rps": 1}, "given without ramp_up_strategy"),
        ({"ramp_up_strategy": "linear"}, "give its start and end rps too"),
        ({"ramp_up_strategy": "linear", "ramp_up_start_rps": 5, "ramp_up_end_rps": 1}, "must be at most"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 5, "request_rate": 3},
            "request_rate: got 3 with a ramp-up",
        ),
    ],
)
def test_traffic_that_cannot_be_is_refused(settings, hint):
    with pytest.raises(ConfigError, match=hint):
        Traffic(**settings)


class Fake:
    """Answers after `seconds`, and remembers what it was asked when."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.ids, self.times = [], []
        self.now = self.most = 0

    async def __call__(self, request, request_id):
        answer = Answer(request, started=time.perf_counter(), chunks=[Chunk(self.seconds, True, None)])
        self.ids.append(request_id)
        self.times.append(answer.started)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.seconds)
        self.now -= 1
        return answer


def send(fake, requests=REQUESTS, seed=0, on_answer=lambda: None, **traffic):
    sender = Sender(ask=fake, traffic=Traffic(**traffic), seed=seed, id_prefix="t-", on_answer=on_answer)
    return asyncio.run(sender.send(requests))


def test_each_request_is_sent_once_and_answers_keep_their_order():
    fake, done = Fake(), []
    run = send(fake, on_answer=lambda: done.append(1))
    assert [answer.request for answer in run.answers] == REQUESTS
    assert fake.ids == [f"t-{number}" for number in range(6)]
    assert len(done) == 6


def test_concurrency_is_limited_and_queue_times_are_recorded():
    fake = Fake(0.05)
    run = send(fake, max_concurrency=2)
    assert fake.most == 2
    waits = [answer.queue_time for answer in run.answers]
    assert max(waits[:2]) < min(waits[2:4]) < min(waits[4:])
    assert min(waits[4:]) > 0.09
    assert run.seconds > 0.14


def test_without_a_limit_all_are_under_way_at_once():
    fake = Fake(0.05)
    send(fake)
    assert fake.most == 6


def test_requests_come_at_the_rate():
    fake = Fake()
    run = send(fake, request_rate=30)
    assert run.seconds > 0.19
    assert fake.times == sorted(fake.times)


def test_a_closed_loop_uses_requests_in_turn_until_the_time_is_up():
    fake = Fake(0.02)
    run = send(fake, duration=0.3, max_concurrency=2)
    assert fake.most == 2
    assert 2 <= len(run.answers) <= 32
    assert [answer.request for answer in run.answers] == (REQUESTS * 6)[: len(run.answers)]
    assert run.seconds >= 0.3


def test_an_open_loop_sends_for_the_duration():
    fake = Fake()
    run = send(fake, duration=0.3, request_rate=40)
    assert len(run.answers) == 12
    assert run.num_unsent == 0


def test_what_finds_no_place_in_time_is_not_sent_and_counted():
    fake = Fake(0.2)
    run = send(fake, duration=0.3, request_rate=40, max_concurrency=1)
    assert len(run.answers) + run.num_unsent == 12
    assert 1 <= len(run.answers) <= 3


@pytest.mark.parametrize("traffic", [{}, {"duration": 60}], ids=["once", "closed loop"])
def test_what_is_answered_before_an_interruption_is_kept(traffic):
    answered = []

    async def run():
        task = asyncio.current_task()

        def on_answer():
            answered.append(1)
            if len(answered) == 3:
                task.cancel()  # as Ctrl-C does

        sender = Sender(ask=Fake(0.05), traffic=Traffic(max_concurrency=1, **traffic), seed=0, on_answer=on_answer)
        found = await sender.send(REQUESTS)
        await asyncio.sleep(0)  # what is asked of the server afterwards is not broken off
        return found

    found = asyncio.run(run())
    assert (found.is_interrupted, found.numbers, found.num_unfinished in (0, 1)) == (True, [0, 1, 2], True)
    assert found.num_unsent == (0 if traffic else 3 - found.num_unfinished)
    assert found.seconds < 5


def test_an_interruption_before_any_answer_leaves_nothing():
    async def run():
        asyncio.get_running_loop().call_later(0.05, asyncio.current_task().cancel)
        await Sender(ask=Fake(60), traffic=Traffic(), seed=0).send(REQUESTS)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())


def test_a_run_that_ends_is_not_interrupted():
    run = send(Fake())
    assert (run.is_interrupted, run.num_unfinished, run.num_unsent) == (False, 0, 0)


def test_a_run_leaves_the_garbage_collector_as_it_was():
    gc.unfreeze()
    send(Fake())
    is_unfrozen = gc.get_freeze_count() == 0
    gc.freeze()  # as it is for all tests
    send(Fake())
    assert is_unfrozen
    assert gc.get_freeze_count() > 0


def test_warm_ups_are_sent_within_the_places():
    fake = Fake(0.01)
    sender = Sender(ask=fake, traffic=Traffic(max_concurrency=2), seed=0, id_prefix="t-")
    assert len(asyncio.run(sender.warm_up(REQUESTS[:3]))) == 3
    assert (fake.most, fake.ids[0]) == (2, "t-warmup-0")
