"""`forerun train`: an estimate first, a bar for each stage, one line of JSON; whatever interrupts it, the same command goes on."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from rich.console import Console

from forerun.cli import loading
from forerun.cli import train as command
from forerun.cli.app import INTERRUPTED, main
from forerun.cli.train import stage_bars
from forerun.train import estimates
from forerun.train.estimates import Estimate
from forerun.train.measuring import Measurement
from forerun.train.packaging import model_card
from forerun.train.run import StageReport
from tests.native import needs_kernels
from tests.train.target_folder import chat_model_folder
from tests.trained_heads import save_trained_head


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that trains on a few prompts in a few steps."""
    monkeypatch.setattr(estimates, "LEAST_STEPS", 3)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Question {number}?\n" for number in range(20)))
    options = ["--prompts", str(prompts), "--epochs", "5", "--draft-vocab-size", "240"]
    return ["train", str(chat_model_folder()), "--output", str(tmp_path / "head"), *options]


def done(tmp_path: Path) -> list[str]:
    """The stages that are complete."""
    found: list[str] = json.loads((tmp_path / "head/training/progress.json").read_text())["done"]
    return found


@pytest.mark.parametrize("text", ["3", "h", "3x", "-3h", "3h 5m", "1h30", ".5h", "0m"])
def test_a_budget_that_is_no_duration_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "m", "--output", "o", f"--budget={text}"]) == 2
    assert f"got {text!r}; must be a time above 0 with its units, e.g. 90s, 10m or 1h30m" in capsys.readouterr().err


def test_a_mistake_is_refused_before_a_model_is_pulled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "pull_if_needed", lambda model: pytest.fail("pulled"))
    assert main(["train", "m", "--output", "o", "--budget", "3h", "--layout", "x"]) == 2
    assert "--layout: got 'x'" in capsys.readouterr().err


@needs_kernels
def test_a_dry_run_says_what_the_run_will_take_and_keeps_nothing(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--dry-run", "--json"]) == 0
    output = capsys.readouterr()
    for phrase in ("writing 0.0", "training on 0.0", "measuring: ", "disk ", "memory ", "acceptance length perhaps 1."):
        assert phrase in output.err
    estimate = json.loads(output.out)
    assert output.out.count("\n") == 1
    assert set(estimate) == {
        *("num_written", "num_trained", "write_seconds", "train_seconds", "measure_seconds", "disk_bytes"),
        *("memory_bytes", "length"),
    }
    assert estimate["train_seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


def test_of_a_head_that_is_trained_further_no_length_is_guessed() -> None:
    said = []
    for length in (1.5, None):
        screen = io.StringIO()
        estimate = Estimate(
            num_written=1e6,
            num_trained=3e6,
            write_seconds=600.0,
            train_seconds=3600.0,
            measure_seconds=60.0,
            disk_bytes=1e9,
            memory_bytes=None,
            length=length,
        )
        command._show_estimate(Console(file=screen), estimate)
        said.append(screen.getvalue())
    assert said[0].endswith("disk 1.0 GB; acceptance length perhaps 1.5, a guess (greedy, drafts of 3 tokens)\n")
    assert said[1].endswith("disk 1.0 GB\n")


@pytest.mark.parametrize(("draft_ms", "line"), [(0.5, "0.50 ms per drafted token, 1.25 times"), (None, "1.25 times")])
def test_times_that_were_not_measured_are_not_shown(draft_ms: float | None, line: str) -> None:
    screen = io.StringIO()
    measured = Measurement(num_tokens=1, at=[], draft_ms=draft_ms, speed_up=1.25)
    command._show(Console(file=screen, width=100), Path("head"), measured)
    assert screen.getvalue() == f"{line} as fast as without drafts\nhead: head\n"


@needs_kernels
def test_a_run_goes_on_after_ctrl_c_in_each_stage_and_ends_with_one_line_of_json(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted_in(stage: str) -> int:
        def report(bars: object, found: StageReport) -> None:
            if found.stage == stage:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(command._BarPerStage, "__call__", report)
            return main(argv)

    for stage in ("write", "mask", "train", "measure", "package"):
        assert interrupted_in(stage) == INTERRUPTED
        assert capsys.readouterr().err.endswith("interrupted: the same command goes on from here\n")
    assert done(tmp_path) == ["write", "train", "measure"]
    assert main([*argv, "--json"]) == 0
    output = capsys.readouterr()
    assert output.out.count("\n") == 1
    found: dict[str, Any] = json.loads(output.out)
    assert set(found) == {"head", "num_tokens", "at", "draft_ms", "speed_up"}
    assert found["head"] == str(tmp_path / "head")
    assert [one["temperature"] for one in found["at"]] == [0.0, 1.0]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "temperature 1: acceptance length" in shown
    assert f"head: {tmp_path / 'head'}" in shown


@needs_kernels
def test_what_an_estimate_refuses_it_refuses_again_before_more_is_written(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert main(["0.4" if word == "5" else word for word in argv]) == 2
        assert "at least 3 of 2048 tokens are needed" in capsys.readouterr().err
        assert done(tmp_path) == []


@needs_kernels
def test_a_run_that_goes_on_in_another_process_is_left_alone(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["0.4" if word == "5" else word for word in argv]) == 2  # there is a folder then
    with FileLock(tmp_path / "head/training/lock"):
        assert main(argv) == 2
    assert "another process goes on with the run in" in capsys.readouterr().err
    assert done(tmp_path) == []


@needs_kernels
def test_the_options_that_a_card_and_the_help_name_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save_trained_head(tmp_path, seed=1))
    card = model_card(target="small", command="forerun train small", facts={}, measured=None)
    (of_card,) = re.findall("`(--speculative-config[^`]*)`", card)
    assert main(["train", "--help"]) == 0
    (of_help,) = re.findall(
        "--speculative-config '[^']*'", " ".join(capsys.readouterr().out.replace("\\\n", "").split())
    )
    for options in (of_card.replace("FOLDER", folder), of_help.replace('"head"', json.dumps(folder))):
        text = ["generate", str(chat_model_folder()), "Hello", "--max-tokens", "8", "--json"]
        assert main([*text, *shlex.split(options)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["speculation"]["num_draft_tokens"] > 0


def drawn(reports: list[StageReport], *, is_terminal: bool) -> str:
    """What the bars show of these reports, half a minute apart."""
    screen, now = io.StringIO(), 1000.0
    console = Console(file=screen, force_terminal=is_terminal, width=100, get_time=lambda: now)
    with stage_bars(console) as report:
        for one in reports:
            report(one)
            now += 31.0
    return screen.getvalue()


def test_each_stage_has_a_bar_with_its_note() -> None:
    reports = [
        StageReport(stage="write", done=1.0, total=2.0, note="half of them"),
        StageReport(stage="write", done=2.0, total=2.0, note="all of them"),
        StageReport(stage="train", done=3.0, total=None, note="loss 2"),
    ]
    shown = drawn(reports, is_terminal=True).splitlines()
    last = [next(line for line in reversed(shown) if stage in line) for stage in ("write", "train")]
    assert "all of them" in last[0]
    assert "loss 2" in last[1]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_folder_with_brackets_in_its_name_is_shown_as_it_is(is_terminal: bool) -> None:
    shown = drawn([StageReport(stage="package", done=1.0, total=1.0, note="a[bold]/[/b]")], is_terminal=is_terminal)
    assert "a[bold]/[/b]" in shown


def test_without_a_terminal_each_stage_says_a_line_a_minute() -> None:
    reports = [StageReport(stage="write", done=float(i), total=4.0, note="texts") for i in range(3)]
    reports.append(StageReport(stage="train", done=1.0, total=None, note="loss 2"))
    assert drawn(reports, is_terminal=False).splitlines() == ["write 0% texts", "write 50% texts", "train loss 2"]
