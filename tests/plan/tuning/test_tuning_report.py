"""The report: what is gained, what ties, what auto is worth, and whether the goals are kept."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forerun.plan.sla import Sla
from forerun.plan.tuning.candidates import BatchLimits, Candidate
from forerun.plan.tuning.choice import Choice, Objective
from forerun.plan.tuning.screening import Screened
from forerun.plan.tuning.tuning_report import TuningReport
from tests.plan.tuning.figures import figures

LIMITS = BatchLimits(max_num_seqs=4, max_num_batched_tokens=64)


def report(best, rounds, *, tied=None, sla=None, objective=Objective.THROUGHPUT):
    candidates = {
        name: Candidate(name=name, speculative_config=None if name == "plain" else {"method": name}, limits=LIMITS)
        for name in rounds
    }
    return TuningReport(
        model="tiny",
        machine="here",
        load="1 client",
        objective=objective,
        choice=Choice(name=best, tied=tied or (best,)),
        candidates=candidates,
        screened=[Screened(candidate=one, figures=figures(100)) for one in candidates.values()],
        rounds=rounds,
        probed=[],
        seconds={"run": 1.0},
        plain="plain",
        auto="auto" if "auto" in rounds else None,
        sla=sla,
    )


ROUNDS = {"suffix": [figures(200), figures(100)], "auto": [figures(190)] * 1, "plain": [figures(100)]}


def test_gains_are_round_by_round():
    found = report("suffix", ROUNDS)
    assert found.gain_over("plain") == 2.0
    assert found.gain_over("suffix") == 1.0
    assert found.gain_over("nobody") is None


def test_reasons_say_when_auto_is_the_best():
    assert any("auto has nothing to set" in line for line in report("auto", ROUNDS).reasons())


def test_reasons_say_when_auto_would_nearly_do():
    rounds = {"suffix": [figures(102)], "auto": [figures(100)], "plain": [figures(50)]}
    assert any("auto is only 2.0% behind" in line for line in report("suffix", rounds).reasons())
    far = {**rounds, "auto": [figures(80)]}
    assert not any("auto is only" in line for line in report("suffix", far).reasons())


def test_reasons_do_not_call_auto_behind_where_it_is_not():
    rounds = {"plain": [figures(100)], "auto": [figures(100.5)]}
    lines = report("plain", rounds, tied=("plain", "auto")).reasons()
    assert any(line.startswith("auto is as good and has nothing to set") for line in lines)
    assert not any("behind" in line for line in lines)


def test_reasons_do_not_call_auto_near_where_latency_decides():
    rounds = {
        "suffix": [figures(100, attainment=1.0, latency=1.0)],
        "auto": [figures(100, attainment=1.0, latency=1.3)],
        "plain": [figures(100, attainment=1.0, latency=2.0)],
    }
    lines = report("suffix", rounds, sla=Sla(ttft=0.5), objective=Objective.GOODPUT).reasons()
    assert not any("nothing to set" in line for line in lines)


def test_reasons_name_what_tied_and_what_wrote_other_texts():
    rounds = {**ROUNDS, "suffix": [figures(200), replace(figures(100), num_differing=2)]}
    lines = report("suffix", rounds, tied=("auto", "suffix")).reasons()
    assert any(line.endswith("simplest was taken: auto.") for line in lines)
    assert "suffix: 2 of 10 answers are not the recorded ones." in lines


@pytest.mark.parametrize(
    ("kept", "wanted", "words"),
    [
        (0.97, 0.95, "97% of the requests keep all goals; 95% were to"),
        (0.5, 0.95, "NOT ENOUGH: 50%"),
        (
            0.9496,
            0.95,
            "NOT ENOUGH: 94.96% of the requests keep all goals, 95% were to; of all that was run the most is 94.96%.",
        ),
        (0.9984, 0.999, "NOT ENOUGH: 99.8% of the requests keep all goals, 99.9% were to"),
        (0.9541, 0.954, "95.4% of the requests keep all goals; 95.4% were to"),
    ],
)
def test_reasons_say_whether_the_goals_are_kept(kept, wanted, words):
    """In as many digits as it takes not to call a miss a hit, nor a hit a miss."""
    rounds = {"auto": [figures(100, attainment=kept)], "plain": [figures(50, attainment=0.1)]}
    sla = Sla(ttft=0.5, attainment=wanted)
    lines = report("auto", rounds, sla=sla, objective=Objective.GOODPUT).reasons()
    assert any(line.startswith(words) for line in lines)


def test_energy_takes_part_in_the_front_only_where_all_runs_have_it():
    rounds = {
        "suffix": [figures(100, latency=1.0, joules=9.0)],
        "plain": [figures(50, latency=2.0, joules=5.0)],
    }
    assert report("suffix", rounds).front() == ["suffix", "plain"]
    rounds["auto"] = [figures(90, latency=1.5)]
    assert report("suffix", rounds).front() == ["suffix"]


def test_a_report_is_json():
    found = json.loads(json.dumps(report("suffix", ROUNDS).to_json()))
    assert found["best"]["name"] == "suffix"
    assert found["gain_over_plain"] == 2.0
    assert [one["name"] for one in found["screened"]] == ["suffix", "auto", "plain"]
