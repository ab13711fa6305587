"""What an installed package must hold is known, and its lack is said; `make package` installs one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.ops.native.library import LEVELS

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "check_installed.py"


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
        ("AMD64", set(LEVELS), ["amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "portable"]),
        ("aarch64", set(LEVELS), ["neonbf16", "neon", "portable"]),
        ("arm64", {"avx2", "neon"}, ["neon"]),
        ("riscv64", set(LEVELS), ["portable"]),
    ],
)
def test_a_level_that_was_not_built_is_named(check, monkeypatch, tmp_path, machine, lacking, named):
    for name in {*LEVELS, "processor"} - lacking:
        (tmp_path / name).touch()
    monkeypatch.setattr(check, "library_file", tmp_path.joinpath)
    assert check.missing_files(machine) == [f"the native kernels for {level} were not built" for level in named]


def test_a_package_that_cannot_tell_what_the_processor_runs_is_refused(check, monkeypatch, tmp_path):
    for level in LEVELS:
        (tmp_path / level).touch()
    monkeypatch.setattr(check, "library_file", tmp_path.joinpath)
    (fault,) = check.missing_files("x86_64")
    assert fault == "the library that says which kernels the processor runs was not built"


def test_a_package_without_the_page_is_refused(check, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "files", lambda name: tmp_path)
    assert check.missing_files("aarch64")[-1] == "the server's page.html is not in the package"


@pytest.mark.parametrize(
    ("target", "levels"),
    [
        ("linux-x86_64", "amx, avx512bf16, avx512vnni, avx512, avxvnni, avx2, portable"),
        ("linux-aarch64", "neonbf16, neon, portable"),
        ("macosx-11.0-arm64", "neonbf16, neon, portable"),
        ("linux-riscv64", "portable"),
    ],
)
def test_a_machine_has_its_own_levels_and_those_of_others_are_refused(target, levels):
    environment = {**os.environ, "_PYTHON_HOST_PLATFORM": target, "FORERUN_BUILD_LEVELS": "avx1024"}
    setup = subprocess.run(
        [sys.executable, "setup.py", "--name"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    expected = f"FORERUN_BUILD_LEVELS: got 'avx1024'; for {target} it may be all, or some of {levels}"
    assert setup.stderr.strip().endswith(expected)
    assert setup.returncode == 1
