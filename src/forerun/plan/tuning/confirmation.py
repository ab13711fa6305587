"""Real runs of the finalists in interleaved rounds; what is clearly behind is dropped on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from forerun.plan.tuning.candidates import Candidate
from forerun.plan.tuning.choice import TIE, Objective, Rounds, relative_values, standings
from forerun.plan.tuning.run_figures import RunFigures

LEAST_ROUNDS = 2
"""Before these nothing is dropped."""

Run = Callable[[Candidate, int], RunFigures]
"""(configuration, number of the round) -> its figures."""


def confirm(
    candidates: Sequence[Candidate],
    run: Run,
    objective: Objective,
    *,
    rounds: int,
    kept: Mapping[tuple[str, int], RunFigures],
    on_run: Callable[[str, int, RunFigures], None] = lambda *_: None,
) -> dict[str, list[RunFigures]]:
    """Run each candidate once per round, in reverse order every other time, and return their runs by name.

    Args:
        candidates: the finalists.
        run: does a real run.
        objective: decides who is dropped.
        rounds: at most; fewer where one alone is left.
        kept: runs of an earlier call that was interrupted, by name and round; they are not done again.
        on_run: called after each run that was done, to keep it.
    """
    found: dict[str, list[RunFigures]] = {one.name: [] for one in candidates}
    left = list(candidates)
    for number in range(rounds):
        for candidate in left if number % 2 == 0 else left[::-1]:
            figures = kept.get((candidate.name, number))
            if figures is None:
                figures = run(candidate, number)
                on_run(candidate.name, number, figures)
            found[candidate.name].append(figures)
        behind = clearly_behind(found, objective)
        left = [one for one in left if one.name not in behind]
        if len(left) == 1 and number + 1 >= LEAST_ROUNDS:
            break
    return found


def clearly_behind(rounds: Rounds, objective: Objective) -> set[str]:
    """Those whose best round is below the leader's worst by more than a tie, after `LEAST_ROUNDS`.

    By the objective's first criterion; where that leaves all equal, by the next one.
    """
    if max(map(len, rounds.values())) < LEAST_ROUNDS:
        return set()
    for criterion in objective.criteria:
        leader = standings(rounds, criterion)[0].name
        values = relative_values(rounds, criterion)
        least = min(values[leader]) * (1.0 - TIE)
        behind = {name for name, shares in values.items() if max(shares) < least}
        if behind:
            return behind
    return set()
