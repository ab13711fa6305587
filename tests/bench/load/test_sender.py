"""Sending over time: order, concurrency and durations, with fake requests instead of a network."""

from __future__ import annotations

import asyncio
import time

from forerun.bench.load.answer import Answer, Chunk, LoadRequest
from forerun.bench.load.sender import Sender
from forerun.bench.load.workload import Traffic

REQUESTS = [LoadRequest(str(number), 1) for number in range(6)]


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


def test_warm_ups_are_sent_within_the_places():
    fake = Fake(0.01)
    sender = Sender(ask=fake, traffic=Traffic(max_concurrency=2), seed=0, id_prefix="t-")
    assert len(asyncio.run(sender.warm_up(REQUESTS[:3]))) == 3
    assert (fake.most, fake.ids[0]) == (2, "t-warmup-0")
