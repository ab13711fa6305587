"""`/metrics`: the engine's counters and each request's latencies, in Prometheus' text format and vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from forerun.core.outputs import RequestOutput, StreamDelta
from forerun.engine.stats import Counter, Gauge, Metric, Vector

__all__ = ["CONTENT_TYPE", "LiveCollector", "ServerMetrics", "expose"]

Family = CounterMetricFamily | GaugeMetricFamily

ENGINE = "0"  # vLLM numbers its engines; here there is one
LATENCY_S = (0.03, 0.1, 0.3, 0.5, 1, 1.5, 2, 3, 5, 10, 15, 20, 30, 60, 120, 300, 600, 1800)
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
SERVED = ("stop", "length")  # finish reasons of completions that were neither aborted nor failed
COMPLETIONS = (1, 2, 5, 10, 16)

HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("From a request's arrival to its first token.", FIRST_TOKEN_S),
    "vllm:inter_token_latency_seconds": ("Between two steps that gave a completion tokens.", TOKEN_S),
    "vllm:request_time_per_output_token_seconds": ("Of a request, after its first token.", TOKEN_S),
    "vllm:e2e_request_latency_seconds": ("From a request's arrival to its end.", LATENCY_S),
    "vllm:request_queue_time_seconds": ("From arrival to the first step with the request.", LATENCY_S),
    "vllm:request_inference_time_seconds": ("From the first step with the request to its end.", LATENCY_S),
    "vllm:request_prefill_time_seconds": ("From the first step with the request to its first token.", LATENCY_S),
    "vllm:request_decode_time_seconds": ("From the first token to the end.", LATENCY_S),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", TOKENS),
    "vllm:request_generation_tokens": ("Tokens of a completion.", TOKENS),
    "vllm:request_params_n": ("Completions that a request asked for.", COMPLETIONS),
    "vllm:iteration_tokens_total": ("Tokens that one step gave, over all sequences.", TOKENS),
}


class EndedCompletions(NamedTuple):
    """Sums over completions that have ended, whatever the reason; several of one prompt count it once each."""

    number: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def plus(self, output: RequestOutput) -> EndedCompletions:
        """With those of a request that ended."""
        number = len(output.outputs)
        return EndedCompletions(
            self.number + number,
            self.prompt_tokens + number * len(output.prompt_token_ids),
            self.answer_tokens + sum(len(completion.token_ids) for completion in output.outputs),
        )


class ServerMetrics:
    """Histograms over requests; `observe` is called by the engine's thread, the rest by the event loop."""

    def __init__(self, model_name: str) -> None:
        self.labels = {"model_name": model_name, "engine": ENGINE}
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        made = {
            name: Histogram(name, about, tuple(self.labels), buckets=buckets, registry=self.registry)
            for name, (about, buckets) in HISTOGRAMS.items()
        }
        self._histograms = {name: histogram.labels(**self.labels) for name, histogram in made.items()}
        self.ended = EndedCompletions()
        self._last_times: dict[tuple[str, int], float] = {}  # of the last tokens, by request and completion

    def observe(self, deltas: Sequence[StreamDelta], finished: Sequence[RequestOutput], now: float) -> None:
        """Count a step: its deltas, the requests that ended with it, and the time of its end (monotonic, s)."""
        if deltas:
            self._note("vllm:iteration_tokens_total", sum(len(delta.token_ids) for delta in deltas))
        for delta in deltas:
            key = (delta.request_id, delta.index)
            if key in self._last_times:
                self._note("vllm:inter_token_latency_seconds", now - self._last_times[key])
            self._last_times[key] = now
        for output in finished:
            self.ended = self.ended.plus(output)
            for completion in output.outputs:
                self._last_times.pop((output.request_id, completion.index), None)
            if all(completion.finish_reason in SERVED for completion in output.outputs):
                self._note_finished(output)

    def _note(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _note_finished(self, output: RequestOutput) -> None:
        self._note("vllm:request_prompt_tokens", len(output.prompt_token_ids))
        self._note("vllm:request_params_n", len(output.outputs))
        for completion in output.outputs:
            self._note("vllm:request_generation_tokens", len(completion.token_ids))
        times = output.metrics
        if times is None or times.first_scheduled_time is None or times.first_token_time is None:
            return
        end = times.finished_time or time.monotonic()
        self._note("vllm:time_to_first_token_seconds", times.first_token_time - times.arrival_time)
        self._note("vllm:e2e_request_latency_seconds", end - times.arrival_time)
        self._note("vllm:request_queue_time_seconds", times.first_scheduled_time - times.arrival_time)
        self._note("vllm:request_inference_time_seconds", end - times.first_scheduled_time)
        self._note("vllm:request_prefill_time_seconds", times.first_token_time - times.first_scheduled_time)
        self._note("vllm:request_decode_time_seconds", end - times.first_token_time)
        longest = max(len(completion.token_ids) for completion in output.outputs)
        if longest > 1:
            self._note("vllm:request_time_per_output_token_seconds", (end - times.first_token_time) / (longest - 1))


ABOUT = {
    "vllm:num_requests_running": "Sequences that are computed.",
    "vllm:num_requests_waiting": "Sequences that wait for a place.",
    "vllm:kv_cache_usage_perc": "Share of the KV blocks in use, 0 to 1.",
    "vllm:cache_config_info": "Always 1; the labels say how many KV blocks there are, and of how many tokens each.",
    "vllm:prompt_tokens": "Prompt tokens computed.",
    "vllm:generation_tokens": "Tokens written.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Of these, tokens that were found.",
    "vllm:num_preemptions": "Sequences that gave up their KV to others.",
    "vllm:request_success": "Completions that ended, by finish reason.",
    "vllm:spec_decode_num_drafts": "Drafts checked.",
    "vllm:spec_decode_num_draft_tokens": "Draft tokens checked.",
    "vllm:spec_decode_num_accepted_tokens": "Draft tokens accepted.",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "Draft tokens accepted, by position in the draft.",
    "forerun:spec_decode_num_reached_per_pos": "Drafts whose position was reached, all before it being accepted.",
    "forerun:spec_decode_num_drafts_by_drafter": "Drafts checked, by drafter.",
    "forerun:spec_decode_num_draft_tokens_by_drafter": "Draft tokens checked, by drafter.",
    "forerun:spec_decode_num_accepted_tokens_by_drafter": "Draft tokens accepted, by drafter.",
    "forerun:spec_decode_tokens_per_second": "Tokens per second, by the costs that the control of drafts has fitted.",
    "forerun:spec_decode_plain_tokens_per_second": "The same, as it would be without drafts.",
    "forerun:spec_decode_regret": "How much faster the best fixed draft length in hindsight would be; 0: not at all.",
    "forerun:spec_decode_best_static_length": "That draft length.",
    "forerun:num_verified_steps": "Verdicts: one per sequence and step.",
    "forerun:num_failed_drafts": "Failures of the drafter, caught.",
    "forerun:phase_seconds": "Time in each phase of a step.",
    "forerun:graph_steps": "Steps that a CUDA graph computed.",
    "forerun:eager_steps": "Steps that no CUDA graph computed.",
    "forerun:executor_info": "Always 1; the labels say which executor computes, on which device and with which kernels.",
    "forerun:device_idle_seconds": "Time in which the device had nothing to do though sequences were waiting.",
    "forerun:num_steps": "Steps of the engine.",
}


class _Snapshot(Collector):
    """The engine's metrics at one moment."""

    def __init__(self, metrics: Iterable[Metric], labels: dict[str, str]) -> None:
        self._families: dict[str, Family] = {}
        for metric in metrics:
            for extra, value in _samples(metric):
                self._add(metric, labels | metric.labels | extra, value)

    def collect(self) -> Iterator[Any]:
        """All families."""
        yield from self._families.values()

    def _add(self, metric: Metric, labels: dict[str, str], value: float) -> None:
        if metric.name not in self._families:
            kind = GaugeMetricFamily if isinstance(metric, Gauge) else CounterMetricFamily
            self._families[metric.name] = kind(metric.name, ABOUT.get(metric.name, metric.name), labels=list(labels))
        self._families[metric.name].add_metric(list(labels.values()), value)


class LiveCollector(Collector):
    """All that is known at the moment of a scrape: what `ask` gives of the engine, and the histograms over requests."""

    def __init__(self, ask: Callable[[], Iterable[Metric]], server: ServerMetrics) -> None:
        self._ask = ask
        self._server = server

    def collect(self) -> Iterator[Any]:
        """All families."""
        yield from _Snapshot(self._ask(), self._server.labels).collect()
        yield from self._server.registry.collect()


def _samples(metric: Metric) -> Iterator[tuple[dict[str, str], float]]:
    match metric:
        case Vector():
            yield from (({"position": str(place)}, value) for place, value in enumerate(metric.values))
        case Counter() | Gauge():
            yield {}, metric.value


def expose(server: ServerMetrics, engine: Iterable[Metric]) -> bytes:
    """Everything in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(engine, server.labels))
    return generate_latest(registry) + generate_latest(server.registry)
