"""The arithmetic of the bandwidth probe."""

from __future__ import annotations

import torch

from forerun.bench.instruments import NUM_READS, BandwidthProbe, Stopwatch
from tests.bench.clocks import SlowingClock, TickingClock

CPU = torch.device("cpu")


def test_bandwidth_is_the_buffers_bytes_over_the_time_of_a_read():
    assert BandwidthProbe(Stopwatch(CPU, TickingClock()), num_bytes=4096).measure() == 4096


def test_each_read_is_of_the_whole_buffer_by_the_given_function():
    read = []
    BandwidthProbe(
        Stopwatch(CPU, TickingClock()), read=lambda buffer: read.append(buffer.nbytes), num_bytes=4096
    ).measure()
    assert read == [4096] * NUM_READS


def test_the_best_of_several_reads_counts():
    assert BandwidthProbe(Stopwatch(CPU, SlowingClock(looks_per_round=2)), num_bytes=4096).measure() == 4096
