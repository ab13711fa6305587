"""GPUs are monitored during a run; without a readable one, figures are null with the reason, never zero."""

from __future__ import annotations

import pytest

from benchmarks.experiment.gpu_monitor import GpuMonitor, Snapshot, joules

KEYS = [
    "gpu_ids",
    "duration",
    "start_time",
    "end_time",
    "total_energy_consumed",
    "total_energy_all_gpus",
    "average_power",
    "peak_power",
    "average_utilization",
    "average_memory_usage",
    "peak_temperature",
    "total_tokens_generated",
    "total_tokens_accepted",
    "total_requests",
    "tokens_per_joule",
    "tokens_accepted_per_joule",
    "tokens_per_kwh",
    "tokens_accepted_per_kwh",
    "snapshots",
]


def look(gpu, timestamp=0.0, power=100.0, energy=None):
    return Snapshot(
        timestamp=timestamp,
        gpu_id=gpu,
        power_draw=power,
        power_limit=700.0,
        utilization_gpu=50.0,
        utilization_memory=10.0,
        memory_used=20,
        memory_total=80,
        temperature=40.0,
        clock_graphics=1500,
        clock_memory=2000,
        energy=energy,
    )


def test_counters_of_all_gpus_are_summed():
    counters = {0: iter(range(0, 10**6, 30)), 1: iter(range(0, 10**6, 10))}
    with GpuMonitor([0, 1], lambda gpu: look(gpu, energy=float(next(counters[gpu]))), None, interval=60) as monitor:
        pass
    report = monitor.to_json(tokens=80, accepted=20, requests=4)
    assert list(report)[: len(KEYS)] == KEYS
    assert report["total_energy_consumed"] == {"0": 30.0, "1": 10.0}
    assert report["tokens_per_joule"] == 2.0
    assert report["tokens_accepted_per_kwh"] == pytest.approx(1.8e6)
    assert report["average_memory_usage"] == {"0": 25.0, "1": 25.0}
    assert len(report["snapshots"]) == 4


def test_without_a_counter_power_is_summed_over_time():
    looks = [look(0, 0.0, 100.0), look(0, 1.0, 300.0), look(0, 3.0, 100.0)]
    assert joules(looks) == 200.0 + 400.0


def test_without_a_gpu_figures_are_null_with_the_reason():
    with GpuMonitor([], None, "there is none", interval=1) as monitor:
        pass
    report = monitor.to_json(tokens=80, accepted=20, requests=4)
    assert report["reason"] == "there is none"
    assert report["average_power"] is report["total_energy_all_gpus"] is report["tokens_per_joule"] is None
    assert report["total_tokens_generated"] == 80


def test_a_gpu_that_fails_ends_the_monitoring():
    def fails(gpu):
        raise RuntimeError("lost")

    with GpuMonitor([0], fails, None, interval=1) as monitor:
        pass
    report = monitor.to_json(tokens=1, accepted=0, requests=1)
    assert "RuntimeError: lost" in report["reason"]
    assert report["snapshots"] == []
