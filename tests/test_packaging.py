"""What an installed package must hold is known, and its lack is said; `make package` installs one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from forerun.ops.native.library import LEVELS

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_installed.py"


@pytest.fixture
def check():
    """The script that `make package` runs in the environment with the wheel."""
    spec = importlib.util.spec_from_file_location("check_installed", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("machine", "lacking", "named"),
    [
        ("x86_64", set(), []),
        ("x86_64", {"avx512"}, ["avx512"]),
        ("AMD64", set(LEVELS), ["avx512bf16", "avx512", "avx2", "portable"]),
        ("aarch64", set(LEVELS), ["neonbf16", "neon", "portable"]),
        ("arm64", {"avx2", "neon"}, ["neon"]),
        ("riscv64", set(LEVELS), ["portable"]),
    ],
)
def test_a_level_that_was_not_built_is_named(check, monkeypatch, tmp_path, machine, lacking, named):
    for level in set(LEVELS) - lacking:
        (tmp_path / level).touch()
    monkeypatch.setattr(check, "library_file", tmp_path.joinpath)
    assert check.missing_files(machine) == [f"the native kernels for {level} were not built" for level in named]


def test_a_package_without_the_page_is_refused(check, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "files", lambda name: tmp_path)
    assert check.missing_files("aarch64")[-1] == "the server's page.html is not in the package"
