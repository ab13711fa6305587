"""The search: what is simulated, and who gets a real run."""

from __future__ import annotations

from forerun.plan.tuning.candidates import BatchLimits, SearchSpace
from forerun.plan.tuning.choice import Objective
from forerun.plan.tuning.screening import finalists, screen, simulation_errors
from tests.plan.tuning.figures import figures

USUAL = BatchLimits(max_num_seqs=64, max_num_batched_tokens=2048)
FEWER = BatchLimits(max_num_seqs=16, max_num_batched_tokens=2048)
WAYS = {
    "auto": {"method": "auto"},
    **{f"n{k}": {"method": "ngram", "num_speculative_tokens": k} for k in (1, 2, 3, 4)},
}
SPEEDS = {"plain": 100, "auto": 150, "n1": 120, "n2": 160, "n3": 155, "n4": 90}


def screened(*, limits=(USUAL, FEWER), bonus=1.0):
    seen = []

    def simulate(candidate):
        seen.append(candidate)
        way = candidate.name.split(",")[0]
        return figures(SPEEDS[way] * (bonus if candidate.limits == FEWER else 1.0))

    found = screen(SearchSpace(speculation=WAYS, limits=limits), simulate, Objective.THROUGHPUT)
    return found, seen


def test_every_way_to_draft_is_simulated_and_the_best_ones_under_other_limits():
    found, seen = screened()
    assert [one.name for one in seen if one.limits == USUAL] == ["plain", *WAYS]
    assert {one.name.split(",")[0] for one in seen if one.limits == FEWER} == {"n2", "n3", "auto"}
    assert [one.candidate.name for one in found][:1] == ["n2"]


def test_another_limit_that_is_better_comes_first():
    found, _ = screened(bonus=1.2)
    assert found[0].candidate.name.startswith("n2, 16 seqs")


def test_finalists_are_near_the_best_and_auto_is_always_one():
    found, _ = screened(limits=(USUAL,))
    assert [one.name for one in finalists(found, Objective.THROUGHPUT, 2)] == ["n2", "n3", "auto"]
    assert [one.name for one in finalists(found, Objective.THROUGHPUT, 1)] == ["n2", "auto"]


def test_what_is_simulated_far_behind_is_no_finalist():
    found, _ = screened(limits=(USUAL,))
    assert "n1" not in [one.name for one in finalists(found, Objective.THROUGHPUT, 9)]


def test_the_simulators_error_is_said_for_each_run():
    found, _ = screened(limits=(USUAL,))
    errors = simulation_errors(found, {"n2": figures(200, latency=0.5)})
    assert errors == {"n2": (160 / 200 - 1, 1.0)}
