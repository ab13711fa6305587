"""Which of several measured configurations is the best: medians with a penalty for scatter, and what ties go to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

from forerun.errors import ConfigError
from forerun.plan.tuning.run_figures import RunFigures

TIE = 0.01
"""Two that differ by less than this share are as good as each other."""

Rounds = Mapping[str, Sequence[RunFigures]]
"""Name of a configuration -> its runs, by round; one that was dropped has fewer."""


class Objective(StrEnum):
    """What is to be best."""

    THROUGHPUT = "throughput"  # output tokens per second
    LATENCY = "latency"  # mean time of a request from arrival to last token
    GOODPUT = "goodput"  # requests per second that keep all goals, then latency
    ENERGY = "energy"  # joules per output token

    @property
    def criteria(self) -> tuple[Criterion, ...]:
        """What is compared, in turn, while the one before leaves a tie."""
        return CRITERIA[self]


@dataclass(frozen=True, slots=True)
class Criterion:
    """A figure of a run, turned so that more is better."""

    name: str
    value: Callable[[RunFigures], float]


def _goodput(figures: RunFigures) -> float:
    if figures.goodput is None:
        raise ConfigError("objective: got goodput without goals; give --goodput, e.g. ttft:500 tpot:50")
    return figures.goodput


def _tokens_per_joule(figures: RunFigures) -> float:
    if figures.joules_per_token is None:
        raise ConfigError("objective: got energy, which nothing counts on this machine; choose throughput or latency")
    return 1.0 / figures.joules_per_token


_LATENCY = Criterion("latency", lambda figures: 1.0 / figures.e2el.mean)
CRITERIA = {
    Objective.THROUGHPUT: (Criterion("throughput", lambda figures: figures.tokens_per_second),),
    Objective.LATENCY: (_LATENCY,),
    Objective.GOODPUT: (Criterion("goodput", _goodput), _LATENCY),
    Objective.ENERGY: (Criterion("energy", _tokens_per_joule),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How one configuration stands by one criterion.

    `median` and `mad` (median absolute deviation) are of its values, round by round, as shares of the mean of those
    configurations that took part in all rounds: so a drift of the machine, which all share, cancels.
    """

    name: str
    median: float
    mad: float

    @property
    def score(self) -> float:
        """What it is sure of: of two equally fast ones, that which scatters less is ahead."""
        return self.median - self.mad


def standings(rounds: Rounds, criterion: Criterion) -> list[Standing]:
    """All configurations by one criterion, best first."""
    found = [
        Standing(name=name, median=median(shares), mad=_median_deviation(shares))
        for name, shares in relative_values(rounds, criterion).items()
    ]
    return sorted(found, key=lambda one: -one.score)


def relative_values(rounds: Rounds, criterion: Criterion) -> dict[str, list[float]]:
    """Each configuration's values by round, as shares of the round's mean over those that took part in all rounds."""
    most = max(map(len, rounds.values()))
    through = [runs for runs in rounds.values() if len(runs) == most]
    means = [fmean(criterion.value(runs[number]) for runs in through) for number in range(most)]
    return {
        name: [criterion.value(run) / mean if mean else 1.0 for run, mean in zip(runs, means, strict=False)]
        for name, runs in rounds.items()
        if runs
    }


def _median_deviation(values: Sequence[float]) -> float:
    middle = median(values)
    return median(abs(value - middle) for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The configuration chosen, and those that tied with it, itself included."""

    name: str
    tied: tuple[str, ...]


def choose(rounds: Rounds, objective: Objective, simplicity: Callable[[str], tuple[float, ...]]) -> Choice:
    """The best configuration; of those within `TIE` of the best score, the simplest.

    One that was dropped is never chosen: it was clearly behind, and its score is too high, as a few rounds scatter little.

    Args:
        rounds: the runs.
        objective: its criteria are applied in turn, each to those that tied by the one before.
        simplicity: of a configuration by its name; less is simpler.

    Raises:
        ConfigError: a run lacks the figure that the objective asks for.
    """
    most = max(map(len, rounds.values()))
    left = [name for name, runs in rounds.items() if len(runs) == most]
    for criterion in objective.criteria:
        found = standings({name: rounds[name] for name in left}, criterion)
        best = found[0].score
        left = [one.name for one in found if one.score >= best - TIE * abs(best)]
    return Choice(name=min(left, key=lambda name: (simplicity(name), left.index(name))), tied=tuple(left))
