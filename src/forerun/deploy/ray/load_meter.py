"""What a service has been asked for, measured from the counters of its replicas: the load that the planner takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

from forerun.engine.stats import Counter, Gauge, Metric
from forerun.plan.load import Load

if TYPE_CHECKING:
    from forerun.server.metrics import EndedCompletions

FEWEST_REQUESTS = 5
"""That must have ended before their mean lengths are believed."""


@dataclass(frozen=True, kw_only=True)
class ReplicaCounts:
    """Sums over a replica's life, but for `underway`, which is of now; each completion is a request with its prompt."""

    underway: float = 0.0  # requests that run or wait
    finished: float = 0.0  # whatever the reason
    prompt_tokens: float = 0.0  # of finished requests, cached ones too
    answer_tokens: float = 0.0  # of finished requests
    queried_tokens: float = 0.0  # prompt tokens looked up in the prefix cache
    cached_tokens: float = 0.0  # of these, found there
    verified_steps: float = 0.0  # verdicts: one per sequence and step
    accepted_tokens: float = 0.0  # drafted tokens that stood

    def to_stats(self) -> dict[str, float]:
        """The record as Ray takes it from a replica."""
        return asdict(self)

    @classmethod
    def from_stats(cls, stats: Mapping[str, float]) -> ReplicaCounts:
        """The counts of such a record; what it lacks is 0."""
        return cls(**{f.name: float(stats.get(f.name, 0.0)) for f in fields(cls)})

    def is_below(self, earlier: ReplicaCounts) -> bool:
        """Whether any sum has fallen, which no replica's does."""
        return any(getattr(self, name) < getattr(earlier, name) for name in COUNTERS - {"underway"})

    def __sub__(self, other: ReplicaCounts) -> ReplicaCounts:
        return ReplicaCounts(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})

    def __add__(self, other: ReplicaCounts) -> ReplicaCounts:
        return ReplicaCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


NONE = ReplicaCounts()
COUNTERS = frozenset(NONE.to_stats())


def counts_of(metrics: Iterable[Metric], ended: EndedCompletions) -> ReplicaCounts:
    """The counts in an engine's metrics, and those of its server."""
    found: dict[str, float] = {}
    for metric in metrics:
        if isinstance(metric, Counter | Gauge):
            found[metric.name] = found.get(metric.name, 0.0) + metric.value
    return ReplicaCounts(
        underway=found.get("vllm:num_requests_running", 0.0) + found.get("vllm:num_requests_waiting", 0.0),
        finished=ended.number,
        prompt_tokens=ended.prompt_tokens,
        answer_tokens=ended.answer_tokens,
        queried_tokens=found.get("vllm:prefix_cache_queries", 0.0),
        cached_tokens=found.get("vllm:prefix_cache_hits", 0.0),
        verified_steps=found.get("forerun:num_verified_steps", 0.0),
        accepted_tokens=found.get("vllm:spec_decode_num_accepted_tokens", 0.0),
    )


@dataclass(frozen=True, kw_only=True)
class MeasuredInterval:
    """What one interval brought: its load, None where nothing came; tokens per verdict, None where nothing was verified."""

    load: Load | None
    tokens_per_step: float | None
    num_steps: int


class LoadMeter:
    """Makes intervals of the replicas' counters, which begin at 0 with each replica and end with it.

    An arrival is a request that has ended or has come to be under way, so each is counted at the replica where it is; those
    of a replica that died are lost. Lengths are means over requests that ended, and are taken to spread as much as their
    mean. A replica that starts again has another name. So where counters fall under the same name the reading is wrong and is
    left out, and what came meanwhile is counted once they have grown again.
    """

    def __init__(self) -> None:
        self._seen: dict[str, ReplicaCounts] = {}
        self._sum = NONE
        self._ended = NONE  # since lengths were learnt last
        self._last_lengths: tuple[float, float] | None = None

    def take(self, counts: Mapping[str, ReplicaCounts]) -> None:
        """Note the counters of the replicas that are there."""
        heard = {name: now for name, now in counts.items() if not now.is_below(self._seen.get(name, NONE))}
        for replica, now in heard.items():
            self._sum += now - self._seen.get(replica, NONE)
        for replica in self._seen.keys() - heard.keys():  # it may come back, with the same counters
            last = self._seen[replica]
            self._sum -= ReplicaCounts(underway=last.underway)
            self._seen[replica] = replace(last, underway=0.0)
        self._seen.update(heard)

    def interval(self, seconds: float) -> MeasuredInterval:
        """What came since the last call; lengths are those of the last requests that ended, as soon as there are enough."""
        total, self._sum = self._sum, NONE
        arrived = max(0.0, total.finished + total.underway)
        self._ended += total
        if self._ended.finished >= FEWEST_REQUESTS:
            ended, self._ended = self._ended, NONE
            self._last_lengths = (
                max(1.0, ended.prompt_tokens / ended.finished),
                max(1.0, ended.answer_tokens / ended.finished),
            )
        load = None
        if arrived > 0.0 and self._last_lengths is not None:
            prompt, answer = self._last_lengths
            hits = total.cached_tokens / total.queried_tokens if total.queried_tokens > 0.0 else 0.0
            load = Load(
                rate=arrived / seconds,
                isl=prompt,
                osl=answer,
                isl_cv=1.0,
                osl_cv=1.0,
                prefix_hit_rate=min(max(hits, 0.0), 0.99),
            )
        steps = round(total.verified_steps)
        return MeasuredInterval(
            load=load,
            tokens_per_step=1.0 + total.accepted_tokens / total.verified_steps if steps > 0 else None,
            num_steps=steps,
        )
