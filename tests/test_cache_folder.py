"""Tests keep nothing in the user's cache folder, and find the models that are pulled there."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from forerun.core.cache_folder import cache_folder
from forerun.errors import ConfigError


def test_a_process_that_a_test_starts_keeps_its_files_in_the_tests_own_folder():
    program = "from forerun.core.cache_folder import cache_folder; print(cache_folder())"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert Path(ended.stdout.strip()) == cache_folder()
    assert cache_folder().parent == Path(tempfile.gettempdir())
    assert not (cache_folder() / "step-costs").is_symlink()


def test_models_are_those_that_the_user_has_pulled():
    models = cache_folder() / "models"
    assert models.is_symlink() or not models.exists()


def test_a_home_folder_that_is_not_known_is_named(monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(
        ConfigError, match="got ~nobody-of-this-name/cache, but that home folder is not known; set FORERUN"
    ):
        cache_folder()
