"""A folder is held by one process at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.core.held_folder import held_folder
from forerun.errors import ConfigError


def test_a_held_folder_is_refused_to_others_until_it_is_let_go(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="--output: another process works here; wait for it, or give another")
    for _ in range(2):
        with held_folder(tmp_path, "--output", "works here"), refused, held_folder(tmp_path, "--output", "works here"):
            pass


def test_a_folder_that_cannot_be_held_is_named(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with (
        pytest.raises(ConfigError, match=r"--output: cannot write in .*thesis\.txt"),
        held_folder(tmp_path / "thesis.txt", "--output", "works here"),
    ):
        pass
