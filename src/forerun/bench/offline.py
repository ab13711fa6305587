"""Measures offline inference, as `vllm bench latency` and `vllm bench throughput` do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.bench.instruments import Clock, Interrupted, Progress, no_progress
from forerun.bench.prompts import random_prompts
from forerun.bench.sharegpt import Exchange, SampledRequest, sample_requests
from forerun.bench.workloads import LatencyWorkload, ThroughputWorkload
from forerun.core.outputs import RequestOutput
from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import SpeculationStats
from forerun.errors import RequestError
from forerun.llm import LLM, Prompt

PERCENTILES = (10, 25, 50, 75, 90, 99)  # of latencies
INPUT_LEN = 1024  # of random prompts in the throughput benchmark, as in vLLM
OUTPUT_LEN = 128


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
        Interrupted: Ctrl-C came after a whole round.
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
    result = LatencyResult(latencies=[], speculation=SpeculationStats())
    try:
        for index in range(num_rounds):
            number = index - workload.num_iters_warmup
            progress(f"round {number + 1} of {workload.num_iters}" if number >= 0 else "warming up")
            llm.reset_stats()
            batch = prompts[index * workload.batch_size : (index + 1) * workload.batch_size]
            start = clock()
            outputs = llm.generate(batch, sampling, use_tqdm=False)
            seconds = clock() - start
            check_outputs(outputs)
            if number >= 0:
                result.latencies.append(seconds)
                result.speculation.add(llm.stats.speculation)
    except KeyboardInterrupt:
        if not result.latencies:
            raise
        raise Interrupted(result, f"{len(result.latencies)} of {workload.num_iters} rounds") from None
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputResult:
    """The counts and duration of one run."""

    elapsed_time: float  # seconds
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    speculation: SpeculationStats

    @property
    def requests_per_second(self) -> float:
        """Requests / elapsed time."""
        return self.num_requests / self.elapsed_time

    @property
    def tokens_per_second(self) -> float:
        """Prompt and output tokens together / elapsed time, as vLLM counts."""
        return (self.num_prompt_tokens + self.num_output_tokens) / self.elapsed_time

    @property
    def output_tokens_per_second(self) -> float:
        """Output tokens / elapsed time."""
        return self.num_output_tokens / self.elapsed_time

    def to_json(self) -> dict[str, Any]:
        """The keys of `vllm bench throughput --output-json`, and counts that vLLM lacks."""
        return {
            "elapsed_time": self.elapsed_time,
            "num_requests": self.num_requests,
            "total_num_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "requests_per_second": self.requests_per_second,
            "tokens_per_second": self.tokens_per_second,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "output_tokens_per_second": self.output_tokens_per_second,
        }


def make_requests(llm: LLM, workload: ThroughputWorkload, exchanges: Sequence[Exchange] = ()) -> list[SampledRequest]:
    """Make the workload's requests; `exchanges` are the conversations of its file.

    Raises:
        ConfigError: the requests do not fit into the engine's sequences, or the file has too few that do.
    """
    if workload.dataset_name == "sharegpt":
        return sample_requests(
            exchanges,
            llm.get_tokenizer().encode,
            num_prompts=workload.num_prompts,
            output_len=workload.output_len,
            max_tokens=llm.max_model_len,
            seed=llm.settings.seed,
        )
    input_len = INPUT_LEN if workload.input_len is None else workload.input_len
    output_len = OUTPUT_LEN if workload.output_len is None else workload.output_len
    prompts = random_prompts(llm, workload.num_prompts, input_len=input_len, output_len=output_len)
    return [SampledRequest(prompt, output_len) for prompt in prompts]


def measure_throughput(
    llm: LLM,
    workload: ThroughputWorkload,
    requests: Sequence[SampledRequest],
    *,
    use_tqdm: bool = False,
    clock: Clock = time.perf_counter,
) -> ThroughputResult:
    """Run all requests, given at once, to their ends.

    Raises:
        Interrupted: Ctrl-C came after the first token.
    """
    prompts: list[Prompt] = [request.prompt_token_ids for request in requests]
    params = [
        SamplingParams(
            n=workload.n,
            temperature=workload.temperature,
            ignore_eos=True,
            max_tokens=request.output_len,
            detokenize=not workload.disable_detokenize,
        )
        for request in requests
    ]
    llm.reset_stats()
    start = clock()
    try:
        outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    except KeyboardInterrupt:
        elapsed, stats = clock() - start, llm.stats
        if not stats.num_generation_tokens:
            raise
        num_ended = sum(count for reason, count in stats.num_finished.items() if reason != "abort") // workload.n
        result = ThroughputResult(
            elapsed_time=elapsed,
            num_requests=num_ended,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_output_tokens=stats.num_generation_tokens,
            speculation=stats.speculation,
        )
        part = f"{num_ended} of {len(requests)} requests, which had ended, and of all tokens that were computed by then"
        raise Interrupted(result, part) from None
    elapsed = clock() - start
    check_outputs(outputs)
    return ThroughputResult(
        elapsed_time=elapsed,
        num_requests=len(requests),
        num_prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
        num_output_tokens=sum(len(text.token_ids) for output in outputs for text in output.outputs),
        speculation=llm.stats.speculation,
    )


def check_outputs(outputs: Sequence[RequestOutput]) -> None:
    """Refuse a measurement in which a request failed.

    Raises:
        RequestError: a request failed.
    """
    for output in outputs:
        if output.error is not None:
            raise RequestError(f"request {output.request_id} failed: {output.error}; nothing was measured")
