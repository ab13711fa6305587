"""The search: every way to draft is simulated, and the best ones under other limits too; the best few are finalists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forerun.plan.tuning.candidates import Candidate, SearchSpace
from forerun.plan.tuning.choice import Objective
from forerun.plan.tuning.run_figures import RunFigures

NUM_REFINED = 3
"""Ways to draft that are simulated under other limits too."""

SIMULATION_ERROR = 0.1
"""How far a simulated figure may be off: what is predicted to be worse than the best by more is not run."""

Simulate = Callable[[Candidate], RunFigures]
Derive = Callable[[Sequence[Candidate]], Candidate | None]
"""Makes one more way to draft of those that were simulated, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """A candidate and what the simulator says of it."""

    candidate: Candidate
    figures: RunFigures


def screen(
    space: SearchSpace, simulate: Simulate, objective: Objective, derive: Derive = lambda _: None
) -> list[Screened]:
    """Simulate the space and return what was simulated, best first.

    First all ways to draft at the usual limits, and what `derive` makes of them; then the best of those that draft with the
    space's other verifiers; then the `NUM_REFINED` best of them, and plain decoding's formats
    among them if they are that good, under each of the other limits. How to draft and how much to batch hardly
    depend on each other, so the product of the two is not gone through.
    """
    found = [Screened(candidate=one, figures=simulate(one)) for one in space.drafting()]
    found = ranked(found, objective)
    derived = derive([one.candidate for one in found])
    if derived is not None:
        found = ranked([*found, Screened(candidate=derived, figures=simulate(derived))], objective)
    for best in [one.candidate for one in found if space.with_other_verifiers(one.candidate)][:1]:
        found += [Screened(candidate=one, figures=simulate(one)) for one in space.with_other_verifiers(best)]
    found = ranked(found, objective)
    for best in [one.candidate for one in found[:NUM_REFINED]]:
        found += [Screened(candidate=one, figures=simulate(one)) for one in space.with_other_limits(best)]
    return ranked(found, objective)


def ranked(screened: Sequence[Screened], objective: Objective) -> list[Screened]:
    """By the objective's first criterion and, where that is equal, the next one; best first."""
    criteria = objective.criteria
    return sorted(screened, key=lambda one: tuple(-criterion.value(one.figures) for criterion in criteria))


def finalists(screened: Sequence[Screened], objective: Objective, most: int, *, plain: Candidate) -> list[Candidate]:
    """The candidates that are worth a real run.

    Those within the simulator's error of the best, `most` at most; and auto, since what it learns while it runs is what a
    simulation sees least of: with the same limits as the best, or where it was not simulated so, with those that suit it best.
    `plain` is run in any case, as all gains are over it.

    Args:
        screened: best first.
        objective: what is to be best.
        most: beside auto and plain decoding.
        plain: plain decoding with the user's own limits and format.
    """
    values = {one.candidate.name: _deciding_values(one, screened[0], objective) for one in screened}
    near = [one.candidate for one in screened if values[one.candidate.name] >= 1.0 - SIMULATION_ERROR]
    chosen = near[:most]
    best = chosen[0]
    autos = [one.candidate for one in screened if one.candidate.is_auto]
    alike = [one for one in autos if (one.limits, one.quantization) == (best.limits, best.quantization)]
    return chosen + [one for one in (*(alike or autos[:1]), plain) if one not in chosen]


def _deciding_values(one: Screened, best: Screened, objective: Objective) -> float:
    """The share of the best one's value by the first criterion in which the two are not equal; 1 if there is none."""
    for criterion in objective.criteria:
        here, there = criterion.value(one.figures), criterion.value(best.figures)
        if here != there:
            return here / there if there else 1.0
    return 1.0


def simulation_errors(
    screened: Sequence[Screened], measured: Mapping[str, RunFigures]
) -> dict[str, tuple[float, float]]:
    """For each measured configuration, simulated over measured - 1: of throughput, and of the mean latency."""
    simulated = {one.candidate.name: one.figures for one in screened}
    return {
        name: (
            simulated[name].tokens_per_second / real.tokens_per_second - 1.0,
            simulated[name].e2el.mean / real.e2el.mean - 1.0,
        )
        for name, real in measured.items()
        if name in simulated
    }
