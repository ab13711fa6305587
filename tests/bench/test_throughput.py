"""`forerun bench throughput`: the requests of a workload, and the counts of a run."""

from __future__ import annotations

import pytest

from forerun.bench.sharegpt import SampledRequest
from forerun.bench.throughput import make_requests, measure_throughput
from forerun.bench.workloads import ThroughputWorkload
from forerun.errors import ConfigError
from tests.bench.clocks import TickingClock

WORKLOAD = ThroughputWorkload(num_prompts=3, input_len=5, output_len=6, n=2)


def test_random_requests_are_as_many_and_as_long_as_asked_for(llm):
    requests = make_requests(llm, WORKLOAD)
    assert [(len(request.prompt_token_ids), request.output_len) for request in requests] == [(5, 6)] * 3


def test_random_requests_beyond_max_model_len_are_refused(llm):
    with pytest.raises(ConfigError, match=r"got 1024 \+ 128 tokens"):
        make_requests(llm, ThroughputWorkload(num_prompts=1))


def test_json_has_vllms_keys_and_counts_tokens_of_prompts_and_outputs(llm):
    report = measure_throughput(llm, WORKLOAD, make_requests(llm, WORKLOAD), clock=TickingClock()).to_json()
    assert report == {
        "elapsed_time": 1.0,
        "num_requests": 3,
        "total_num_tokens": 3 * 5 + 3 * 2 * 6,
        "requests_per_second": 3.0,
        "tokens_per_second": 51.0,
        "num_prompt_tokens": 15,
        "num_output_tokens": 36,
        "output_tokens_per_second": 36.0,
    }


def test_each_request_writes_its_own_number_of_tokens(llm):
    requests = [SampledRequest([1, 2], 3), SampledRequest([3, 4], 9)]
    assert measure_throughput(llm, ThroughputWorkload(), requests).num_output_tokens == 12


def test_counts_are_of_this_run_alone(llm):
    requests = make_requests(llm, WORKLOAD)
    first, second = (measure_throughput(llm, WORKLOAD, requests).speculation.num_steps for _ in range(2))
    assert first == second
