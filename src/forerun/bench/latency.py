"""Measures the latency of one batch of requests, as `vllm bench latency` does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.bench.answers import check_outputs
from forerun.bench.instruments import Clock, Progress, no_progress
from forerun.bench.prompts import random_prompts
from forerun.bench.workloads import LatencyWorkload
from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import SpeculationStats
from forerun.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyResult:
    """Seconds of each round, and the counts of speculation over all of them."""

    latencies: list[float]
    speculation: SpeculationStats

    @property
    def avg_latency(self) -> float:
        """Mean seconds of a round."""
        return float(np.mean(self.latencies))

    @property
    def percentiles(self) -> dict[str, float]:
        """Percent -> seconds."""
        return {str(percent): float(np.percentile(self.latencies, percent)) for percent in PERCENTILES}

    def to_json(self) -> dict[str, Any]:
        """The keys of `vllm bench latency --output-json`."""
        return {
            "avg_latency": self.avg_latency,
            "std_latency": float(np.std(self.latencies)),
            "latencies": self.latencies,
            "percentiles": self.percentiles,
        }


def measure_latency(
    llm: LLM,
    workload: LatencyWorkload,
    *,
    progress: Progress = no_progress,
    clock: Clock = time.perf_counter,
) -> LatencyResult:
    """Run a batch of random prompts to its end, round after round.

    Each round has prompts of its own, so that neither the prefix cache nor a drafter's memory makes a
    later round cheaper.

    Raises:
        ConfigError: prompt and output are longer than the engine's sequences.
    """
    num_rounds = workload.num_iters_warmup + workload.num_iters
    prompts = random_prompts(
        llm, num_rounds * workload.batch_size, input_len=workload.input_len, output_len=workload.output_len
    )
    sampling = SamplingParams(
        n=workload.n,
        temperature=workload.temperature,
        ignore_eos=True,
        max_tokens=workload.output_len,
        detokenize=not workload.disable_detokenize,
    )
    latencies: list[float] = []
    for index in range(num_rounds):
        is_warm = index >= workload.num_iters_warmup
        progress(f"round {index - workload.num_iters_warmup + 1} of {workload.num_iters}" if is_warm else "warming up")
        if index == workload.num_iters_warmup:
            llm.reset_stats()
        batch = prompts[index * workload.batch_size : (index + 1) * workload.batch_size]
        start = clock()
        outputs = llm.generate(batch, sampling, use_tqdm=False)
        seconds = clock() - start
        check_outputs(outputs)
        if is_warm:
            latencies.append(seconds)
    return LatencyResult(latencies=latencies, speculation=llm.stats.speculation)
