"""Latency: rounds of warm-up, and the times of the others. Throughput: the requests, and the counts of a run."""

from __future__ import annotations

import pytest

from forerun import LLM
from forerun.bench.instruments import Interrupted
from forerun.bench.offline import make_requests, measure_latency, measure_throughput
from forerun.bench.sharegpt import SampledRequest
from forerun.bench.workloads import LatencyWorkload, ThroughputWorkload
from forerun.errors import ConfigError
from tests.bench.clocks import SlowingClock, TickingClock
from tests.bench.interruptions import interrupt

LATENCY = LatencyWorkload(input_len=5, output_len=6, batch_size=2, num_iters_warmup=1, num_iters=3)
THROUGHPUT = ThroughputWorkload(num_prompts=3, input_len=5, output_len=6, n=2)


class RecordingLLM(LLM):
    """Remembers what it was asked for."""

    def generate(self, prompts, *args, **kwargs):
        self.batches.append(prompts)
        return super().generate(prompts, *args, **kwargs)


@pytest.fixture
def recording(folder):
    llm = RecordingLLM(folder, load_format="dummy", max_model_len=64)
    llm.batches = []
    return llm


def test_latency_json_has_vllms_keys(llm):
    report = measure_latency(llm, LATENCY, clock=TickingClock()).to_json()
    assert list(report) == ["avg_latency", "std_latency", "latencies", "percentiles"]
    assert list(report["percentiles"]) == ["10", "25", "50", "75", "90", "99"]


def test_only_rounds_after_the_warm_up_are_timed(llm):
    result = measure_latency(llm, LATENCY, clock=SlowingClock(looks_per_round=2))
    assert result.latencies == [2.0, 4.0, 8.0]


def test_counts_leave_the_warm_up_out(llm):
    steps = measure_latency(llm.with_speculation(None), LATENCY).speculation.num_steps
    assert steps == LATENCY.num_iters * LATENCY.batch_size * LATENCY.output_len


def test_batches_are_of_the_sizes_asked_for(recording):
    measure_latency(recording, LATENCY)
    assert [[len(prompt) for prompt in batch] for batch in recording.batches] == [[5, 5]] * 4


def test_no_prompt_comes_twice(recording):
    measure_latency(recording, LATENCY)
    prompts = [tuple(prompt) for batch in recording.batches for prompt in batch]
    assert len(set(prompts)) == len(prompts)


def test_requests_longer_than_the_model_allows_are_refused(llm):
    with pytest.raises(ConfigError, match=r"got 200 \+ 100 tokens; max_model_len is 256"):
        measure_latency(llm, LatencyWorkload(input_len=200, output_len=100))


def test_random_requests_are_as_many_and_as_long_as_asked_for(llm):
    requests = make_requests(llm, THROUGHPUT)
    assert [(len(request.prompt_token_ids), request.output_len) for request in requests] == [(5, 6)] * 3


def test_random_requests_beyond_max_model_len_are_refused(llm):
    with pytest.raises(ConfigError, match=r"got 1024 \+ 128 tokens"):
        make_requests(llm, ThroughputWorkload(num_prompts=1))


def test_throughput_json_has_vllms_keys_and_counts_tokens_of_prompts_and_outputs(llm):
    report = measure_throughput(llm, THROUGHPUT, make_requests(llm, THROUGHPUT), clock=TickingClock()).to_json()
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
    requests = make_requests(llm, THROUGHPUT)
    first, second = (measure_throughput(llm, THROUGHPUT, requests).speculation.num_steps for _ in range(2))
    assert first == second


def test_ctrl_c_leaves_whole_rounds_and_their_counts(llm, monkeypatch):
    pumps_per_round = LATENCY.output_len
    interrupt(monkeypatch, LLM, "_pump", at=3 * pumps_per_round + 2)  # in the third round after the one of warm-up
    with pytest.raises(Interrupted, match="2 of 3 rounds") as caught:
        measure_latency(llm.with_speculation(None), LATENCY)
    found = caught.value.found
    assert len(found.latencies) == 2
    assert found.speculation.num_steps == 2 * LATENCY.batch_size * LATENCY.output_len


@pytest.mark.parametrize("measure", [lambda llm: measure_latency(llm, LATENCY), lambda llm: throughput(llm)])
def test_ctrl_c_before_anything_is_measured_leaves_nothing(llm, monkeypatch, measure):
    interrupt(monkeypatch, LLM, "_pump", at=1)
    with pytest.raises(KeyboardInterrupt) as caught:
        measure(llm)
    assert not isinstance(caught.value, Interrupted)


def throughput(llm):
    return measure_throughput(llm, THROUGHPUT, make_requests(llm, THROUGHPUT))
