"""A command line whose models are fakes."""

from __future__ import annotations

import pytest

from forerun.cli import loading
from tests.cli.fakes import FakeLLM, FakeLoader


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> FakeLoader:
    fake = FakeLoader(FakeLLM())
    monkeypatch.setattr(loading, "load_llm", fake)
    return fake
