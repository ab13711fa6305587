"""What a simulation found: latencies, throughput, goodput, KV use, preemptions, drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.core.load_figures import Figures, Peaks, Spread
from forerun.core.stats import SpeculationStats
from forerun.plan.simulation.records import GapLog, RequestRecord, StepLog
from forerun.plan.simulation.replica_group import Lifetime
from forerun.plan.sla import Sla

Floats = npt.NDArray[np.float64]

PERCENTS = (50.0, 90.0, 95.0, 99.0)
"""Percentiles of latencies that are reported."""


@dataclass(frozen=True, slots=True)
class Values:
    """Values, each as often as it occurred."""

    values: Floats  # ascending
    counts: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls, values: Sequence[float] | Floats, counts: Sequence[int] | npt.NDArray[np.int64] | None = None
    ) -> Values:
        """Values with their counts; None: each occurred once."""
        found = np.asarray(values, dtype=np.float64)
        numbers = np.ones(len(found), dtype=np.int64) if counts is None else np.asarray(counts, dtype=np.int64)
        order = np.argsort(found, kind="stable")
        return cls(found[order], numbers[order])

    @property
    def num_values(self) -> int:
        """How many there are."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Their mean; nan where there is none."""
        return float(self.values @ self.counts / self.num_values) if len(self.values) else math.nan

    @property
    def deviation(self) -> float:
        """Their standard deviation; nan where there is none."""
        if not len(self.values):
            return math.nan
        return math.sqrt(float(np.square(self.values - self.mean) @ self.counts) / self.num_values)

    def percentile(self, percent: float) -> float:
        """As numpy's `percentile` of all of them, with linear interpolation; nan where there is none."""
        if not len(self.values):
            return math.nan
        place = percent / 100 * (self.num_values - 1)
        ends = np.cumsum(self.counts)
        low, high = (
            float(self.values[np.searchsorted(ends, math.floor(place) + above, side="right").clip(max=len(ends) - 1)])
            for above in (0, 1)
        )
        return low + (high - low) * (place - math.floor(place))

    def spread(self, percents: Sequence[float]) -> Spread:
        """Mean, deviation and percentiles in milliseconds."""
        if not len(self.values):
            return Spread(None, None, None, dict.fromkeys(percents))
        return Spread(
            1e3 * self.mean,
            1e3 * self.percentile(50),
            1e3 * self.deviation,
            {percent: 1e3 * self.percentile(percent) for percent in percents},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOutcome:
    """What one replica did.

    `kv_usage` and `num_running` are means over the time in which it stepped; KV counts while a step holds it.
    """

    kind: str  # "decode", "prefill", or "aggregated": both
    num_steps: int
    busy_seconds: float
    kv_usage: float
    peak_kv_usage: float
    num_running: float
    num_preemptions: int
    num_prompt_tokens: int  # computed, those computed again after a preemption aside
    num_cached_tokens: int

    @classmethod
    def of(
        cls,
        kind: str,
        steps: StepLog,
        *,
        num_blocks: int,
        num_preemptions: int,
        num_prompt_tokens: int,
        num_cached_tokens: int,
    ) -> ReplicaOutcome:
        """Sum up a replica's steps."""
        seconds = np.asarray(steps.seconds)
        used, running = np.asarray(steps.num_used_blocks), np.asarray(steps.num_running)
        busy = float(seconds.sum())
        return cls(
            kind=kind,
            num_steps=len(seconds),
            busy_seconds=busy,
            kv_usage=float(used @ seconds) / busy / num_blocks if busy else 0.0,
            peak_kv_usage=float(used.max()) / num_blocks if len(used) else 0.0,
            num_running=float(running @ seconds) / busy if busy else 0.0,
            num_preemptions=num_preemptions,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What came of all requests; times in seconds from the simulation's start.

    `steps` are the logs of the replicas in the order of `replicas`, `lifetimes` says when each was up, and `gaps` has
    the times between chunks.
    """

    requests: list[RequestRecord]
    replicas: list[ReplicaOutcome]
    steps: list[StepLog]
    gaps: list[GapLog]
    lifetimes: list[Lifetime]
    speculation: SpeculationStats
    energy_joules: float | None  # None: the profile has no energy

    @property
    def start(self) -> float:
        """When the first request arrived."""
        return self.requests[0].arrival

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(one.finished for one in self.requests) - self.start

    def engine_seconds(self, *, since: float, until: float) -> float:
        """How long engines were up in all, from a time on.

        One that was given up counts until it was drained, the others to `until` or to their last step, if that is later.
        """
        total = 0.0
        for life, log in zip(self.lifetimes, self.steps, strict=True):
            stop = max(until, log.ends[-1] if log.ends else 0.0) if life.stop is None else life.stop
            total += max(0.0, stop - max(life.start, since))
        return total

    @property
    def num_input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(one.num_prompt_tokens for one in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(one.num_output_tokens for one in self.requests)

    @property
    def request_throughput(self) -> float:
        """Requests per second."""
        return len(self.requests) / self.seconds

    @property
    def output_throughput(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.seconds

    @property
    def num_preemptions(self) -> int:
        """Of all replicas."""
        return sum(one.num_preemptions for one in self.replicas)

    def latencies(self, name: str) -> Values:
        """The values of "ttft", "tpot" or "e2el" (one per request that has it), or "itl" and "icl" (the times between chunks)."""
        if name in ("itl", "icl"):
            seconds = np.concatenate([np.asarray(one.seconds) for one in self.gaps] or [np.empty(0)])
            counts = np.concatenate([np.asarray(one.counts) for one in self.gaps] or [np.empty(0, dtype=np.int64)])
            return Values.of(seconds, counts)
        found = np.array([getattr(one, name) for one in self.requests])
        return Values.of(found[~np.isnan(found)])

    def attainment(self, sla: Sla) -> float:
        """The share of requests that keep all limits; an answer of one token keeps any limit of time per token."""
        return sum(self.attained(sla)) / len(self.requests)

    def attained(self, sla: Sla) -> list[bool]:
        """Whether each request keeps all limits; see `attainment`."""
        return [_attains(one, sla) for one in self.requests]

    def goodput(self, sla: Sla) -> float:
        """Requests per second that keep all limits."""
        return self.attainment(sla) * self.request_throughput

    def figures(self, sla: Sla | None = None, *, percents: Sequence[float] = PERCENTS) -> Figures:
        """Counts, throughputs and latencies, as those of a load test."""
        return Figures(
            seconds=self.seconds,
            completed=len(self.requests),
            failed=0,
            total_input=self.num_input_tokens,
            total_output=self.num_output_tokens,
            num_good=None if sla is None else round(self.attainment(sla) * len(self.requests)),
            peaks=self._peaks(),
            spreads={name: self.latencies(name).spread(percents) for name in ("ttft", "tpot", "itl", "icl", "e2el")},
        )

    def to_json(self, sla: Sla | None = None) -> dict[str, Any]:
        """All figures, in the keys of `vllm bench serve` where it has them; the same simulation gives the same bytes."""
        drafts = self.speculation
        return {
            **self.figures(sla).to_json(),
            "slo_attainment": None if sla is None else self.attainment(sla),
            "num_preemptions": self.num_preemptions,
            "prefix_cache_hit_rate": sum(one.num_cached_tokens for one in self.requests) / self.num_input_tokens,
            "energy_joules": self.energy_joules,
            "joules_per_output_token": None
            if self.energy_joules is None
            else self.energy_joules / self.num_output_tokens,
            "spec_decode_num_drafts": drafts.num_drafts,
            "spec_decode_draft_tokens": drafts.num_draft_tokens,
            "spec_decode_accepted_tokens": drafts.num_accepted_tokens,
            "spec_decode_acceptance_rate": None if drafts.acceptance_rate is None else 100 * drafts.acceptance_rate,
            "spec_decode_per_position_acceptance_rates": drafts.acceptance_per_position,
            "acceptance_length": drafts.acceptance_length,
            "replicas": [asdict(one) for one in self.replicas],
        }

    def _peaks(self) -> Peaks:
        """The largest counts of any second since the first arrival."""
        seconds = np.concatenate([np.asarray(log.ends) for log in self.steps]) - self.start
        chunks, tokens = (
            _by_second(seconds, np.concatenate([np.asarray(getattr(log, name)) for log in self.steps]))
            for name in ("num_chunks", "num_tokens")
        )
        begins = np.array([one.arrival for one in self.requests]) - self.start
        ends = np.array([one.finished for one in self.requests]) - self.start
        changes = _by_second(np.concatenate([begins, ends + 1.0]), np.repeat([1.0, -1.0], len(self.requests)))
        return Peaks(
            float(chunks.max(initial=0.0)), float(tokens.max(initial=0.0)), int(np.cumsum(changes).max(initial=0.0))
        )

    def records_to_json(self) -> dict[str, Any]:
        """One entry per request, in the arrays of `vllm bench serve --save-detailed`; `itls` where chunks were kept."""
        found: dict[str, Any] = {
            "input_lens": [one.num_prompt_tokens for one in self.requests],
            "output_lens": [one.num_output_tokens for one in self.requests],
            "ttfts": [one.ttft for one in self.requests],
            "latencies": [one.e2el for one in self.requests],
            "start_times": [one.arrival for one in self.requests],
            "queue_times": [0.0 for _ in self.requests],  # in the client
            "errors": ["" for _ in self.requests],
            "replica_numbers": [one.replica for one in self.requests],
            "cached_lens": [one.num_cached_tokens for one in self.requests],
            "scheduled_times": [one.started for one in self.requests],
        }
        if self.requests[0].chunks is not None:
            kept = [one.chunks or [] for one in self.requests]
            found["itls"] = [np.diff([time for time, _ in chunks]).tolist() for chunks in kept]
            found["chunk_tokens"] = [[tokens for _, tokens in chunks] for chunks in kept]
        return found


def _attains(one: RequestRecord, sla: Sla) -> bool:
    """Whether a request keeps all limits; an answer of one token has no time per token, which keeps any."""
    tpot, icl = (0.0 if math.isnan(value) else value for value in (one.tpot, one.icl))
    return sla.is_met(ttft=one.ttft, tpot=tpot, icl=icl, e2el=one.e2el)


def _by_second(seconds: Floats, counts: npt.NDArray[Any]) -> Floats:
    """The sum of the counts in each whole second that has any, in order."""
    _, places = np.unique(np.floor(seconds), return_inverse=True)
    return np.bincount(places, weights=counts).astype(np.float64)
