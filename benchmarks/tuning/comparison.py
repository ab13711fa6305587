"""Holds a tuning against the sweep: how good is what it chose, by the sweep's own runs, and how long did it take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.tuning.sweep import check_complete
from forerun.plan.tuning.choice import Objective, Rounds, standings

MOST_LOST, MOST_TIME = 0.03, 0.2
"""The goals: within 3 % of the sweep's best, in at most a fifth of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningComparison:
    """One load: what the sweep and the tuning chose. `share` is the tuned one's median over the best one's."""

    load: str
    num_configurations: int
    best: str
    tuned: str
    share: float
    sweep_seconds: float
    tune_seconds: float
    simulated_rank_of_best: int  # from 1, among all that were simulated

    @property
    def share_of_time(self) -> float:
        """The tuning's time over the sweep's."""
        return self.tune_seconds / self.sweep_seconds

    @property
    def keeps_goals(self) -> bool:
        """Whether it is as good and as quick as it must be."""
        return self.share >= 1.0 - MOST_LOST and self.share_of_time <= MOST_TIME

    def to_json(self) -> dict[str, Any]:
        """All fields, and what follows from them."""
        return asdict(self) | {"share_of_time": self.share_of_time, "keeps_goals": self.keeps_goals}


def compare(
    load: str, objective: Objective, swept: Rounds, sweep_seconds: float, tuned: Mapping[str, Any]
) -> TuningComparison:
    """Compare by the sweep's runs alone: the tuning's own decide nothing.

    Args:
        load: a phrase.
        objective: what was to be best; its first criterion counts.
        swept: all runs of the sweep.
        sweep_seconds: what they took.
        tuned: the tuning's report as JSON.

    Raises:
        ConfigError: the sweep is not complete.
    """
    check_complete(swept)
    medians = {one.name: one.median for one in standings(swept, objective.criteria[0])}
    best = max(medians, key=lambda name: medians[name])
    chosen = tuned["best"]["name"]
    simulated = [one["name"] for one in tuned["screened"]]
    return TuningComparison(
        load=load,
        num_configurations=len(swept),
        best=best,
        tuned=chosen,
        share=medians[chosen] / medians[best],
        sweep_seconds=sweep_seconds,
        tune_seconds=sum(tuned["seconds"].values()),
        simulated_rank_of_best=simulated.index(best) + 1,
    )
