"""What commands show: texts as they are, and a measurement's progress."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from forerun import cli
from forerun.cli.console import bar, plain_console, spinner, status

ODD = "a [red]b[/x] :heart:"
"""What rich takes for markup, for a mistake in it, and for an emoji."""


def test_brackets_and_colons_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(ODD, title=ODD)
    table.add_row(ODD)
    plain_console().print(ODD, table)
    assert capsys.readouterr().out.count(ODD) == 4


def test_a_file_has_room_for_wide_tables(capsys: pytest.CaptureFixture[str]) -> None:
    plain_console().print("wide " * 22)
    assert capsys.readouterr().out == "wide " * 22 + "\n"


def test_no_command_has_a_console_of_its_own() -> None:
    folder = Path(cli.__file__).parent
    assert [path.name for path in folder.glob("*.py") if "Console(" in path.read_text()] == ["console.py"]


def test_a_line_of_progress_may_hold_brackets() -> None:
    with status() as progress:
        progress(ODD)


def test_a_bar_shows_how_much_is_done_and_what_is_measured() -> None:
    text = io.StringIO()
    with bar(Console(file=text, force_terminal=True, width=120)) as shown:
        shown.progress("round 1 of 2: [3] of 5")
        shown.advance(0.4)
    assert "40%" in text.getvalue()
    assert "round 1 of 2: [3] of 5" in text.getvalue()


def test_without_a_terminal_no_bar_is_shown() -> None:
    text = io.StringIO()
    with bar(Console(file=text, force_terminal=False)) as shown:
        shown.advance(0.4)
    assert not text.getvalue()


def test_a_model_with_brackets_in_its_name_is_loaded_under_that_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with spinner("Loading a[bold]/[/b]"):
        pass
    assert "Loading a[bold]/[/b]" in capsys.readouterr().err
