"""Batches arrive by count, or when they are due, one at a time."""

from __future__ import annotations

from benchmarks.experiment.arrivals import BatchArrival, batch_arrivals
from benchmarks.experiment.settings import read_settings


class Time:
    def __init__(self):
        self.now = 100.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def given(answer_seconds, **variables):
    time, arrivals = Time(), []
    for arrival in batch_arrivals(read_settings(variables), time.clock, time.sleep):
        arrivals.append(arrival)
        time.sleep(answer_seconds)
    return arrivals, time.now - 100.0


def test_by_count_the_last_batch_is_smaller():
    arrivals, seconds = given(2.0, NUM_PROMPTS="6", BATCH_SIZE="4")
    assert arrivals == [BatchArrival(4, 0.0, 0.0), BatchArrival(2, 2.0, 0.0)]
    assert seconds == 4.0


def test_at_a_rate_batches_start_when_they_are_due():
    arrivals, seconds = given(0.5, AUTO_RATE="2", AUTO_DURATION="7", BATCH_SIZE="4")
    assert arrivals == [BatchArrival(4, due, 0.0) for due in (0.0, 2.0, 4.0, 6.0)]
    assert seconds == 7.0


def test_a_slow_engine_gets_late_batches_at_once_and_none_after_the_end():
    arrivals, seconds = given(3.0, AUTO_RATE="1", AUTO_DURATION="8", ENABLE_BATCH="false")
    assert arrivals == [BatchArrival(1, 0.0, 0.0), BatchArrival(1, 3.0, 2.0), BatchArrival(1, 6.0, 4.0)]
    assert seconds == 9.0
