"""Loading a model from the command line: which models are pulled first."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import forerun
from forerun.cli import loading
from forerun.cli.options import EngineOptions
from forerun.models import store
from forerun.models.download import Report
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


def test_the_tokenizer_is_read_before_anything_that_needs_torch(
    pulled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []

    def make_llm(model: str, **settings: object) -> FakeLLM:
        events.append("LLM")
        return FakeLLM()

    monkeypatch.setattr(forerun, "LLM", make_llm)
    monkeypatch.setattr(loading, "read_ahead", events.append)
    loading.load_llm(str(tmp_path), EngineOptions())
    assert events == [tmp_path, "LLM"]


@pytest.mark.parametrize("model", ["x" * 300, "~nobody-of-that-name", "./absent", "org/name"])
def test_a_name_that_is_no_model_is_left_to_the_library(pulled: list[str], model: str) -> None:
    with loading._loading(model):
        pass


def test_nothing_is_collected_while_a_model_loads_and_what_was_loaded_never_is(
    pulled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting: list[bool] = []

    def make_llm(model: str, **settings: object) -> FakeLLM:
        collecting.append(gc.isenabled())
        return FakeLLM()

    monkeypatch.setattr(forerun, "LLM", make_llm)
    num_frozen = gc.get_freeze_count()
    loading.load_llm("org/name", EngineOptions())
    assert collecting == [False]
    assert gc.isenabled()
    assert gc.get_freeze_count() > num_frozen
