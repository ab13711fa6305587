"""Pulling a model: a bar for each stage."""

from __future__ import annotations

import pytest
from rich import progress as rich_progress

from forerun.cli import pulling
from forerun.models.download import Progress


def test_bars_take_every_stage_of_a_pull() -> None:
    with pulling.pull_bars() as report:
        for progress in (Progress("wait"), Progress("download", 1, 2), Progress("check", 2, 2), Progress("convert")):
            report(progress)


@pytest.mark.parametrize(("total", "shown"), [(93_000_000, "46.5/93.0 MB"), (1_200, "0.6/1.2 kB")])
def test_a_bar_says_how_much_there_is_of_small_files_too(total: int, shown: str) -> None:
    bars = rich_progress.Progress(disable=True)
    pulling._BarPerStage(bars)(Progress("check", total // 2, total))
    assert bars.tasks[0].fields["size"] == shown
