"""Interleaved rounds, who drops out, and going on after an interruption."""

from __future__ import annotations

import pytest

from forerun.plan.tuning.candidates import BatchLimits, Candidate
from forerun.plan.tuning.choice import Objective
from forerun.plan.tuning.confirmation import clearly_behind, confirm
from tests.plan.tuning.figures import figures

LIMITS = BatchLimits(max_num_seqs=4, max_num_batched_tokens=64)


def candidates(*names):
    return [Candidate(name=name, speculative_config=None, limits=LIMITS) for name in names]


class Runs:
    """Scripted speeds, and the order in which runs were asked for."""

    def __init__(self, **speeds):
        self.speeds, self.asked, self.kept = speeds, [], []

    def __call__(self, candidate, number):
        self.asked.append((candidate.name, number))
        return figures(self.speeds[candidate.name][number])

    def confirm(self, *names, rounds=3, kept=()):
        return confirm(
            candidates(*names), self, Objective.THROUGHPUT, rounds=rounds, kept=kept, on_round=self.kept.append
        )


def test_every_other_round_goes_backwards():
    runs = Runs(a=[100, 100], b=[100, 100])
    runs.confirm("a", "b", rounds=2)
    assert runs.asked == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_far_behind_after_one_round_is_not_run_again():
    found = Runs(a=[100, 100, 100], b=[99, 101, 100], slow=[80]).confirm("a", "b", "slow")
    assert {name: len(runs) for name, runs in found.items()} == {"a": 3, "b": 3, "slow": 1}


def test_near_enough_stays_until_its_best_round_is_below_the_leaders_worst():
    found = Runs(a=[100, 101, 100], b=[95, 96, 95], c=[100, 99, 101]).confirm("a", "b", "c")
    assert {name: len(runs) for name, runs in found.items()} == {"a": 3, "b": 2, "c": 3}


def test_one_that_is_left_alone_is_not_run_on():
    found = Runs(a=[100, 100, 100], b=[50]).confirm("a", "b")
    assert len(found["a"]) == 1


def test_an_interrupted_confirmation_goes_on_after_its_last_whole_round():
    first = Runs(a=[100], b=[100, 100])
    with pytest.raises(IndexError):
        first.confirm("a", "b")
    assert first.kept == [{"a": figures(100), "b": figures(100)}]
    second = Runs(a=[0, 101, 102], b=[0, 102, 101])
    found = second.confirm("a", "b", kept=first.kept)
    assert ("a", 0) not in second.asked
    assert [run.tokens_per_second for run in found["a"]] == pytest.approx([100, 101, 102])


def test_where_all_keep_their_goals_the_next_criterion_drops():
    rounds = {
        "fast": [figures(100, latency=1.0, attainment=1.0)] * 2,
        "slow": [figures(100, latency=1.5, attainment=1.0)] * 2,
    }
    assert clearly_behind(rounds, Objective.GOODPUT) == {"slow"}


def test_whom_a_kept_round_lacks_is_run_and_the_round_not_kept_again():
    """An earlier version ran plain decoding only where it was good enough."""
    runs = Runs(plain=[95, 96], a=[None, 101])
    found = runs.confirm("a", "plain", rounds=2, kept=[{"a": figures(100)}])
    assert runs.asked == [("plain", 0), ("plain", 1), ("a", 1)]
    assert [run.tokens_per_second for run in found["plain"]] == pytest.approx([95, 96])
    assert [run.tokens_per_second for run in found["a"]] == pytest.approx([100, 101])
    assert len(runs.kept) == 1
