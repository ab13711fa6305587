"""Loading a model from the command line: which models are pulled first."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from rich import progress as rich_progress

import forerun
from forerun.cli import loading
from forerun.cli.options import EngineOptions
from forerun.models import store
from forerun.models.download import Progress, Report
from forerun.models.store import KNOWN_MODELS
from tests.cli.fakes import FakeLLM

NAME = next(iter(KNOWN_MODELS))


@pytest.fixture
def pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were pulled into an empty cache; nothing is fetched."""
    names: list[str] = []

    def pull(name: str, *, report: Report) -> Path:
        names.append(name)
        return tmp_path

    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store, "pull", pull)
    return names


def test_absent_known_model_is_pulled(pulled: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    loading.pull_if_needed(NAME)
    output = capsys.readouterr()
    assert pulled == [NAME]
    assert output.out == ""
    assert f"model {NAME} is absent" in output.err


def test_folder_of_the_same_name_is_not_pulled_over(pulled: list[str], tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    loading.pull_if_needed(NAME)
    assert pulled == []


@pytest.mark.parametrize("model", ["org/name", "./folder", "smollm2"])
def test_other_models_are_left_to_the_library(pulled: list[str], model: str) -> None:
    loading.pull_if_needed(model)
    assert pulled == []


def test_llm_gets_the_engine_options(pulled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def make_llm(model: str, **settings: object) -> FakeLLM:
        calls.append((model, settings))
        return FakeLLM()

    monkeypatch.setitem(vars(forerun), "LLM", make_llm)  # set so, forerun.llm is not imported
    loading.load_llm("./folder", EngineOptions(seed=3))
    assert calls == [("./folder", EngineOptions(seed=3).settings())]


def test_a_model_with_brackets_in_its_name_is_loaded_under_that_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with loading.spinner("Loading a[bold]/[/b]"):
        pass
    assert "Loading a[bold]/[/b]" in capsys.readouterr().err


def test_bars_take_every_stage_of_a_pull() -> None:
    with loading.pull_bars() as report:
        for progress in (Progress("wait"), Progress("download", 1, 2), Progress("check", 2, 2), Progress("convert")):
            report(progress)


@pytest.mark.parametrize(("total", "shown"), [(93_000_000, "46.5/93.0 MB"), (1_200, "0.6/1.2 kB")])
def test_a_bar_says_how_much_there_is_of_small_files_too(total: int, shown: str) -> None:
    bars = rich_progress.Progress(disable=True)
    loading._BarPerStage(bars)(Progress("check", total // 2, total))
    assert bars.tasks[0].fields["size"] == shown


def test_nothing_is_collected_while_a_model_loads_and_what_was_loaded_never_is(
    pulled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting: list[bool] = []

    def make_llm(model: str, **settings: object) -> FakeLLM:
        collecting.append(gc.isenabled())
        return FakeLLM()

    monkeypatch.setattr(forerun, "LLM", make_llm)
    num_frozen = gc.get_freeze_count()
    try:
        loading.load_llm("org/name", EngineOptions())
        assert collecting == [False]
        assert gc.isenabled()
        assert gc.get_freeze_count() > num_frozen
    finally:
        gc.unfreeze()
