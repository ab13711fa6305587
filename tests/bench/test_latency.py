"""`forerun bench latency`: rounds of warm-up, and the times of the others."""

from __future__ import annotations

import pytest

from forerun import LLM
from forerun.bench.latency import measure_latency
from forerun.bench.workloads import LatencyWorkload
from forerun.errors import ConfigError
from tests.bench.clocks import SlowingClock, TickingClock

WORKLOAD = LatencyWorkload(input_len=5, output_len=6, batch_size=2, num_iters_warmup=1, num_iters=3)


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


def test_json_has_vllms_keys(llm):
    report = measure_latency(llm, WORKLOAD, clock=TickingClock()).to_json()
    assert list(report) == ["avg_latency", "std_latency", "latencies", "percentiles"]
    assert list(report["percentiles"]) == ["10", "25", "50", "75", "90", "99"]


def test_only_rounds_after_the_warm_up_are_timed(llm):
    result = measure_latency(llm, WORKLOAD, clock=SlowingClock(looks_per_round=2))
    assert result.latencies == [2.0, 4.0, 8.0]


def test_counts_leave_the_warm_up_out(llm):
    steps = measure_latency(llm, WORKLOAD).speculation.num_steps
    assert steps == WORKLOAD.num_iters * WORKLOAD.batch_size * WORKLOAD.output_len


def test_batches_are_of_the_sizes_asked_for(recording):
    measure_latency(recording, WORKLOAD)
    assert [[len(prompt) for prompt in batch] for batch in recording.batches] == [[5, 5]] * 4


def test_no_prompt_comes_twice(recording):
    measure_latency(recording, WORKLOAD)
    prompts = [tuple(prompt) for batch in recording.batches for prompt in batch]
    assert len(set(prompts)) == len(prompts)


def test_requests_longer_than_the_model_allows_are_refused(llm):
    with pytest.raises(ConfigError, match=r"got 200 \+ 100 tokens; max_model_len is 256"):
        measure_latency(llm, LatencyWorkload(input_len=200, output_len=100))
