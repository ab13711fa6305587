"""Measures requests and tokens per second with all requests given at once, as `vllm bench throughput` does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.bench.answers import check_outputs
from forerun.bench.instruments import Clock
from forerun.bench.prompts import random_prompts
from forerun.bench.sharegpt import Exchange, SampledRequest, sample_requests
from forerun.bench.workloads import ThroughputWorkload
from forerun.config.inputs import Prompt
from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import SpeculationStats
from forerun.llm import LLM

INPUT_LEN = 1024
OUTPUT_LEN = 128


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
    """Run all requests, given at once, to their ends."""
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
    outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    elapsed = clock() - start
    check_outputs(outputs)
    return ThroughputResult(
        elapsed_time=elapsed,
        num_requests=len(requests),
        num_prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
        num_output_tokens=sum(len(text.token_ids) for output in outputs for text in output.outputs),
        speculation=llm.stats.speculation,
    )
