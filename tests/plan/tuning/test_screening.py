"""The search: what is simulated, and who gets a real run."""

from __future__ import annotations

from dataclasses import replace

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
PLAIN = SearchSpace(speculation=WAYS, limits=(USUAL,)).plain
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


def test_what_is_derived_of_the_best_is_simulated_too():
    asked = []

    def derive(candidates):
        asked.append([one.name for one in candidates])
        return replace(candidates[0], name="n2 by batch size")

    def simulate(candidate):
        return figures({**SPEEDS, "n2 by batch size": 170}[candidate.name.split(",")[0]])

    found = screen(SearchSpace(speculation=WAYS, limits=(USUAL, FEWER)), simulate, Objective.THROUGHPUT, derive)
    assert asked == [["n2", "n3", "auto", "n1", "plain", "n4"]]
    assert [one.candidate.name for one in found[:2]] == ["n2 by batch size", "n2 by batch size, 16 seqs"]


def test_the_best_way_to_draft_is_simulated_with_other_verifiers_and_these_under_other_limits():
    seen = []

    def simulate(candidate):
        seen.append(candidate.name)
        way, *rest = candidate.name.split(", ")
        return figures(SPEEDS[way] + (20 if "block" in rest else 0))

    space = SearchSpace(speculation=WAYS, limits=(USUAL, FEWER), verifiers=("standard", "block"))
    found = screen(space, simulate, Objective.THROUGHPUT)
    assert [name for name in seen if "standard" in name or "block" in name][:2] == ["n2, standard", "n2, block"]
    assert [one.candidate.name for one in found[:2]] == ["n2, block", "n2, block, 16 seqs"]
    assert "auto, block" not in seen


def test_auto_with_a_verifier_that_was_set_is_no_auto_that_is_always_run():
    speeds = {**SPEEDS, "auto": 200}
    space = SearchSpace(speculation=WAYS, limits=(USUAL,), verifiers=("block",))
    found = screen(
        space, lambda one: figures(speeds[one.name.split(",")[0]] - 50 * ("block" in one.name)), Objective.THROUGHPUT
    )
    assert [one.name for one in finalists(found, Objective.THROUGHPUT, 1, plain=PLAIN)] == ["auto", "plain"]


def test_finalists_are_near_the_best_and_auto_is_always_one():
    found, _ = screened(limits=(USUAL,))
    assert [one.name for one in finalists(found, Objective.THROUGHPUT, 2, plain=PLAIN)] == ["n2", "n3", "auto", "plain"]
    assert [one.name for one in finalists(found, Objective.THROUGHPUT, 1, plain=PLAIN)] == ["n2", "auto", "plain"]


def test_auto_is_a_finalist_too_where_it_was_not_simulated_under_the_limits_of_the_best():
    speeds = {**SPEEDS, "auto": 110}
    space = SearchSpace(speculation=WAYS, limits=(USUAL, FEWER))
    found = screen(
        space,
        lambda one: figures(speeds[one.name.split(",")[0]] * (1.5 if one.limits == FEWER else 1.0)),
        Objective.THROUGHPUT,
    )
    assert [one.name for one in finalists(found, Objective.THROUGHPUT, 1, plain=PLAIN)] == [
        "n2, 16 seqs",
        "auto",
        "plain",
    ]


def test_gains_are_over_plain_decoding_in_the_users_own_format_also_where_another_is_among_the_best():
    space = SearchSpace(speculation=WAYS, limits=(USUAL,), quantizations=(None, "int8"))
    found = screen(
        space,
        lambda one: figures(300 if one.name == "plain, int8" else SPEEDS[one.name.split(",")[0]]),
        Objective.THROUGHPUT,
    )
    names = [one.name for one in finalists(found, Objective.THROUGHPUT, 1, plain=space.plain)]
    assert (names[0], names[-1]) == ("plain, int8", "plain")


def test_what_is_simulated_far_behind_is_no_finalist():
    found, _ = screened(limits=(USUAL,))
    assert "n1" not in [one.name for one in finalists(found, Objective.THROUGHPUT, 9, plain=PLAIN)]


def test_the_simulators_error_is_said_for_each_run():
    found, _ = screened(limits=(USUAL,))
    errors = simulation_errors(found, {"n2": figures(200, latency=0.5)})
    assert errors == {"n2": (160 / 200 - 1, 1.0)}
