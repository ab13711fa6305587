"""Pieces: what they hold, their order, and a run that goes on where it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.auto_speculation import run
from benchmarks.auto_speculation.pieces import PieceFile
from benchmarks.auto_speculation.run import Turn, plan_turns
from forerun.errors import ConfigError
from tests.bench.clocks import TickingClock
from tests.contract.drafters import MoodyDrafter

TURN = Turn(workload="code", round=0, configs=("plain", "judged", "other"))


def test_each_piece_has_plain_decoding_the_judged_configuration_and_some_others():
    turns = plan_turns(["code"], ["a", "judged", "b", "c"], judged="judged", rounds=1, static_at_once=2)
    assert [turn.configs for turn in turns] == [("plain", "judged", "a", "b"), ("plain", "judged", "c")]


def test_without_others_plain_decoding_and_the_judged_configuration_remain():
    turns = plan_turns(["code"], ["judged"], judged="judged", rounds=1, static_at_once=2)
    assert [turn.configs for turn in turns] == [("plain", "judged")]


def test_all_workloads_have_a_round_before_the_next_one():
    turns = plan_turns(["code", "random"], ["judged"], judged="judged", rounds=2, static_at_once=2)
    assert [(turn.workload, turn.round) for turn in turns] == [
        ("code", 0),
        ("random", 0),
        ("code", 1),
        ("random", 1),
    ]


def test_every_configuration_answers_every_group_with_plain_decodings_texts(runner, workload):
    piece = runner.measure(TURN, workload)
    assert [(one.group, one.config) for one in piece.measurements] == [
        (group, config) for group in range(3) for config in TURN.configs
    ]
    assert not any(one.num_differing for one in piece.measurements)
    assert len({one.text for one in piece.measurements}) == 3
    assert any(one.num_accepted_tokens for one in piece.measurements if one.config == "judged")


def test_configurations_take_turns_there_and_back(runner, workload, monkeypatch):
    seen, engines, original = [], [], run.answer

    def note(llm, group, *, salt, clock):
        if llm not in engines:
            engines.append(llm)
        seen.append((engines.index(llm), salt))
        return original(llm, group, salt=salt, clock=clock)

    monkeypatch.setattr(run, "answer", note)
    runner.measure(TURN, workload)
    warm_up, measured = seen[:3], seen[3:]
    assert warm_up == [(number, "warm-up") for number in range(3)]
    assert [number for number, _ in measured] == [0, 1, 2, 2, 1, 0, 0, 1, 2]


def test_a_text_that_differs_is_counted(runner, workload, monkeypatch):
    original = run.answer

    def lie(llm, group, *, salt, clock):
        found = original(llm, group, salt=salt, clock=clock)
        drafts = llm.speculative.num_speculative_tokens
        return replace(found, texts=[[*found.texts[0], 1]]) if drafts == 1 else found

    monkeypatch.setattr(run, "answer", lie)
    piece = runner.measure(TURN, workload)
    assert {one.config for one in piece.measurements if one.num_differing} == {"other"}


def test_failed_drafts_are_counted(runner, workload):
    runner.configs = {"judged": {"method": MoodyDrafter, "num_speculative_tokens": 3}}
    piece = runner.measure(Turn(workload="code", round=0, configs=("plain", "judged")), workload)
    assert sum(one.num_failed_drafts for one in piece.measurements if one.config == "judged")


def turns_of(runner, rounds=2):
    return [*plan_turns(["code"], [*runner.configs], judged="judged", rounds=rounds, static_at_once=1)]


def test_a_run_measures_every_turn_once_however_often_it_is_called(runner, workload):
    turns = turns_of(runner)
    assert runner.run(turns, lambda name: workload) == 0
    before = runner.file.read()
    assert [(piece.round, (*piece.configs,)) for piece in before] == [(turn.round, turn.configs) for turn in turns]
    assert runner.run(turns, lambda name: workload) == 0
    assert runner.file.read() == before


def test_a_run_whose_time_is_up_goes_on_later(runner, workload):
    turns = turns_of(runner)
    runner.clock = TickingClock()
    left = runner.run(turns, lambda name: workload, seconds=10)
    assert 0 < left < len(turns)
    assert runner.run(turns, lambda name: workload) == 0
    assert len(runner.file.read()) == len(turns)


def test_what_a_file_holds_already_is_not_left(runner, workload):
    turns = turns_of(runner)
    runner.run(turns[-1:], lambda name: workload)
    assert runner.run(turns, lambda name: workload, seconds=0) == len(turns) - 1


def test_pieces_of_another_model_or_with_another_meaning_of_a_name_are_not_added_to(runner, workload):
    runner.run(turns_of(runner, rounds=1), lambda name: workload)
    runner.circumstances = {**runner.circumstances, "model": "large"}
    with pytest.raises(ConfigError, match="has model 'tiny', not 'large'; measure into another file"):
        runner.run([], lambda name: workload)
    runner.circumstances["model"] = "tiny"
    runner.configs = {**runner.configs, "other": runner.configs["third"]}
    with pytest.raises(ConfigError, match="has the configuration other"):
        runner.run([], lambda name: workload)


def test_pieces_come_back_from_the_file_as_they_were(runner, workload, tmp_path):
    pieces = [runner.measure(TURN, workload), runner.measure(replace(TURN, round=1), workload)]
    file = PieceFile(tmp_path / "other.json")
    assert (file.read(), file.circumstances()) == ([], {})
    file.write(pieces, {"model": "tiny"})
    assert (file.read(), file.circumstances()) == (pieces, {"model": "tiny"})
