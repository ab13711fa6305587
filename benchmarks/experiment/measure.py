"""Measures one run: gives batches to a started engine while energy and GPUs are monitored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.experiment.arrivals import batch_arrivals
from benchmarks.experiment.gpu_monitor import GpuMonitor, find_gpus
from benchmarks.experiment.results import Batch, Measured, Request
from benchmarks.experiment.settings import Settings
from benchmarks.experiment.start import Started
from forerun.bench.energy import Energy, EnergyMeter

PrintLine = Callable[[str], None]
ShowAnswer = Callable[[list[int], list[int]], None]
"""Is called with each prompt and its answer, which ENABLE_DEBUG prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The measurements of a run; `monitor` is None if GPU monitoring is off."""

    measured: Measured
    energy: Energy
    monitor: GpuMonitor | None


def measure(
    started: Started,
    settings: Settings,
    prompts: Iterator[list[int]],
    *,
    print_line: PrintLine,
    show_answer: ShowAnswer,
) -> Outcome:
    """Give the engine all batches, each when it arrives.

    Raises:
        WorkerError: the engine failed or died.
    """
    measured = Measured()
    meter = EnergyMeter.of_this_machine()
    monitor = GpuMonitor(*find_gpus(), interval=settings.gpu_monitor_interval) if settings.enable_gpu_monitor else None
    began = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(meter)
        if monitor:
            stack.enter_context(monitor)
        for number, arrival in enumerate(batch_arrivals(settings), start=1):
            print_line(f"Batch {number}: {arrival.num_prompts} prompts (elapsed {arrival.elapsed:.1f} s)")
            batch = [next(prompts) for _ in range(arrival.num_prompts)]
            answer = started.worker.ask("batch", prompts=batch, max_tokens=settings.generation_length)
            _record(measured, batch, answer, late=arrival.late)
            for prompt, one in zip(batch, answer["answers"], strict=True):
                show_answer(prompt, one["token_ids"])
    measured.seconds = time.perf_counter() - began
    measured.cpu_seconds -= started.cpu_seconds
    return Outcome(measured=measured, energy=meter.energy, monitor=monitor)


def _record(measured: Measured, prompts: list[list[int]], answer: dict[str, Any], *, late: float) -> None:
    requests = [
        Request(
            prompt_tokens=len(prompt),
            generated_tokens=len(one["token_ids"]),
            ttft=one["first_token_seconds"],
            total_latency=one["seconds"],
            drafted=one["drafted"],
            accepted=one["accepted"],
        )
        for prompt, one in zip(prompts, answer["answers"], strict=True)
    ]
    measured.batches.append(Batch(requests=requests, seconds=answer["seconds"], late=late))
    measured.cpu_seconds = answer["cpu_seconds"]
    measured.peak_bytes = answer["peak_bytes"]
    measured.peak_gpu_bytes = answer["peak_gpu_bytes"]
    measured.num_failed_drafts = answer["num_failed_drafts"]
