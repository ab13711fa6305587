"""The cache folder is the one that the environment names."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.core.cache_folder import cache_folder


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"FORERUN_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/forerun"),
        ({"HOME": "/home/someone"}, "/home/someone/.cache/forerun"),
    ],
)
def test_cache_folder_follows_the_environment(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORERUN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)
