"""The sweep goes on where it was, and the tuning is judged by the sweep's runs."""

from __future__ import annotations

import pytest

from benchmarks.tuning.comparison import compare
from benchmarks.tuning.sweep import SweepFile, rounds_of, seconds_of, sweep
from forerun.errors import ConfigError
from forerun.plan.tuning.candidates import BatchLimits, Candidate
from forerun.plan.tuning.choice import Objective
from tests.plan.tuning.figures import figures

LIMITS = BatchLimits(max_num_seqs=4, max_num_batched_tokens=64)
CANDIDATES = [Candidate(name=name, speculative_config=None, limits=LIMITS) for name in ("a", "b/c")]
IDENTITY = {"model": "tiny"}


@pytest.fixture
def file(tmp_path):
    return SweepFile(tmp_path / "sweep.json")


def run_all(file, *, budget=99, asked=None, identity=IDENTITY):
    asked = [] if asked is None else asked

    def run(candidate, number):
        asked.append((candidate.name, number))
        return figures(100 + number if candidate.name == "a" else 150)

    return sweep(CANDIDATES, run, file, identity, rounds=2, is_time_up=lambda: len(asked) >= budget)


def test_a_sweep_that_was_cut_short_goes_on(file):
    first, second = [], []
    assert run_all(file, budget=3, asked=first) == 1
    assert run_all(file, asked=second) == 0
    assert first + second == [("a", 0), ("b/c", 0), ("b/c", 1), ("a", 1)]


def test_a_file_of_another_sweep_is_refused(file):
    run_all(file)
    with pytest.raises(ConfigError, match="another sweep"):
        run_all(file, identity={"model": "other"})


def test_runs_come_back_by_configuration_and_round(file):
    run_all(file)
    runs = file.read(IDENTITY)
    found = rounds_of(runs)
    assert [run.tokens_per_second for run in found["a"]] == pytest.approx([100, 101])
    assert [run.tokens_per_second for run in found["b/c"]] == pytest.approx([150, 150])
    assert seconds_of(runs) > 0


def tuned(name, seconds=10.0):
    screened = [{"name": "b/c"}, {"name": "a"}]
    return {"best": {"name": name}, "screened": screened, "seconds": {"run": seconds}}


def test_the_sweeps_runs_say_how_good_the_tuned_configuration_is(file):
    swept = {"a": [figures(100)] * 2, "b/c": [figures(150)] * 2}
    good = compare("1 client", Objective.THROUGHPUT, swept, 100.0, tuned("b/c"))
    assert (good.share, good.share_of_time, good.keeps_goals) == (1.0, 0.1, True)
    bad = compare("1 client", Objective.THROUGHPUT, swept, 100.0, tuned("a"))
    assert bad.share == pytest.approx(2 / 3)
    assert not bad.keeps_goals
    assert (bad.best, bad.simulated_rank_of_best) == ("b/c", 1)


def test_a_tuning_that_takes_too_long_misses_its_goal():
    swept = {"a": [figures(100)], "b/c": [figures(150)]}
    assert not compare("1 client", Objective.THROUGHPUT, swept, 40.0, tuned("b/c")).keeps_goals


def test_half_a_sweep_decides_nothing():
    with pytest.raises(ConfigError, match="b/c has 1 of 2 rounds"):
        compare("1 client", Objective.THROUGHPUT, {"a": [figures(1)] * 2, "b/c": [figures(1)]}, 1.0, tuned("a"))
