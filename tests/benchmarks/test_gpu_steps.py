"""The benchmark of steps on a GPU runs on a CPU with a tiny shape, by the formulas."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import gpu_steps
from tests.stand_in import save_stand_in

pytestmark = pytest.mark.slow  # a tool for machines with a GPU

QUESTIONS = ["rows", "idle", "small", "sampling", "capture"]


@pytest.fixture
def answers(tmp_path, monkeypatch):
    path = tmp_path / "steps.json"
    arguments = [
        "--device",
        "cpu",
        "--shape",
        "tiny",
        "--steps",
        "2",
        "--rounds",
        "1",
        "--context",
        "40",
        "--json",
        str(path),
    ]
    monkeypatch.setattr(sys, "argv", ["gpu_steps", *arguments, "--only", *QUESTIONS])
    assert gpu_steps.main() == 0
    return json.loads(path.read_text())


def test_every_question_is_answered(answers):
    assert set(QUESTIONS) < set(answers)
    assert all(taken > 0 for taken in answers["small"].values())
    assert answers["rows"]["of one row"][f"{gpu_steps.OURS}, 1 rows"] == 1.0
    assert len(answers["rows"]["ms"]) == 8
    assert answers["idle"]["suffix, on the host"]["drafting"] > 0
    assert answers["idle"]["first layers, on the device"]["drafting"] >= 0
    assert answers["sampling"]["microseconds"] > 0
    assert "CPU" in answers["capture"]["left out"]


def test_a_small_model_may_have_its_own_weights(tmp_path, monkeypatch, capsys):
    folder = save_stand_in(tmp_path)
    (folder / "config.json").rename(folder / "kept.json")
    arguments = ["--device", "cpu", "--steps", "1", "--rounds", "1", "--only", "small", "--small-model", str(folder)]
    monkeypatch.setattr(sys, "argv", ["gpu_steps", *arguments])
    assert gpu_steps.main() == 1
    assert f"{folder}: " in capsys.readouterr().out, "it was to be read"
    (folder / "kept.json").rename(folder / "config.json")
    assert gpu_steps.main() == 0
    assert gpu_steps.OURS in capsys.readouterr().out


def test_a_question_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    def fails(_bench):
        raise RuntimeError("not today")

    monkeypatch.setitem(gpu_steps.QUESTIONS, "idle", fails)
    monkeypatch.setattr(sys, "argv", ["gpu_steps", "--device", "cpu", "--shape", "tiny", "--only", "idle", "capture"])
    assert gpu_steps.main() == 1
    printed = capsys.readouterr().out
    assert "not today" in printed
    assert "there are no CUDA graphs on a CPU" in printed


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu_steps.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_steps"])
    assert gpu_steps.main() == 2
    assert "found no CUDA device" in capsys.readouterr().err
