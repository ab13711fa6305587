"""Real runs of the finalists in interleaved rounds; what is clearly behind is dropped on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from forerun.plan.tuning.candidates import Candidate
from forerun.plan.tuning.choice import TIE, Objective, Rounds, relative_values, standings
from forerun.plan.tuning.run_figures import RunFigures

FAR_BEHIND = 0.1
"""Who is this share below the leader after one round is not run again: rounds scatter by less."""

Run = Callable[[Candidate, int], RunFigures]
"""(configuration, number of the round) -> its figures."""

Round = Mapping[str, RunFigures]
"""Name of a configuration -> its run in one round."""


def confirm(
    candidates: Sequence[Candidate],
    run: Run,
    objective: Objective,
    *,
    rounds: int,
    kept: Sequence[Round] = (),
    on_round: Callable[[Round], object] = lambda _: None,
) -> dict[str, list[RunFigures]]:
    """Run each candidate once per round, in reverse order every other time, and return their runs by name.

    Args:
        candidates: the finalists.
        run: does a real run.
        objective: decides who is dropped.
        rounds: at most; fewer where one alone is left.
        kept: the first rounds, if an earlier call that was interrupted has done them; whom one of them lacks is run now.
        on_round: called after each round that was done here, to keep it.
    """
    found: dict[str, list[RunFigures]] = {one.name: [] for one in candidates}
    left = list(candidates)
    for number in range(rounds):
        done = dict(kept[number]) if number < len(kept) else {}
        missing = [one for one in left if one.name not in done]
        done |= {one.name: run(one, number) for one in (missing if number % 2 == 0 else missing[::-1])}
        if number >= len(kept):
            on_round(done)
        for one in left:
            found[one.name].append(done[one.name])
        behind = clearly_behind(found, objective)
        left = [one for one in left if one.name not in behind]
        if len(left) == 1:
            break
    return found


def clearly_behind(rounds: Rounds, objective: Objective) -> set[str]:
    """Those whose best round is below the leader's worst by more than a tie; after one round, those far below it.

    By the objective's first criterion; where that leaves all equal, by the next one.
    """
    margin = FAR_BEHIND if max(map(len, rounds.values())) == 1 else TIE
    for criterion in objective.criteria:
        leader = standings(rounds, criterion)[0].name
        values = relative_values(rounds, criterion)
        least = min(values[leader]) * (1.0 - margin)
        behind = {name for name, shares in values.items() if max(shares) < least}
        if behind:
            return behind
    return set()
