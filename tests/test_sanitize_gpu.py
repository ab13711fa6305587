"""`make sanitize-gpu`, without a GPU: what it says where something is missing, and what it would run."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "sanitize_gpu.sh"

pytestmark = pytest.mark.skipif(shutil.which("sh") is None, reason="needs a shell")


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run(tmp_path, *, has_gpu=True, has_sanitizer=True, code=0):
    """The script with stand-ins for Python and the sanitizer, which tell their arguments."""
    program(tmp_path / "bin" / "python", f'[ "$1" = -c ] && exit {0 if has_gpu else 1}; echo python "$@"')
    folder = tmp_path / "path"
    folder.mkdir()
    for name in ("sh", "echo"):
        (folder / name).symlink_to(shutil.which(name))
    if has_sanitizer:
        program(
            folder / "compute-sanitizer",
            f'echo "sanitizer $*; caching off: $PYTORCH_NO_CUDA_MEMORY_CACHING"; exit {code}',
        )
    environment = {"PATH": str(folder), "BIN": str(tmp_path / "bin")}
    return subprocess.run([shutil.which("sh"), SCRIPT], env=environment, capture_output=True, text=True, cwd=ROOT)


def test_without_the_sanitizer_it_says_where_that_is(tmp_path):
    ended = run(tmp_path, has_sanitizer=False)
    assert ended.returncode == 2
    assert ended.stderr == (
        "sanitize-gpu: compute-sanitizer is not on PATH; it comes with the CUDA toolkit, in /usr/local/cuda/bin, say\n"
    )


def test_without_a_gpu_it_says_so(tmp_path):
    ended = run(tmp_path, has_gpu=False)
    assert ended.returncode == 2
    assert "torch sees no CUDA device" in ended.stderr


def test_each_tool_runs_the_tests_with_a_memory_of_its_own_for_each_tensor(tmp_path):
    ended = run(tmp_path)
    assert ended.returncode == 0, ended.stderr
    runs = [line for line in ended.stdout.splitlines() if line.startswith("sanitizer")]
    assert [re.search(r"--tool (\w+)", line)[1] for line in runs] == ["memcheck", "racecheck", "synccheck"]
    assert all("--error-exitcode 9" in line and line.endswith("caching off: 1") for line in runs)


def test_what_the_sanitizer_finds_ends_it_with_an_error(tmp_path):
    ended = run(tmp_path, code=9)
    assert ended.returncode == 9
    assert ended.stdout.count("caching off") == 1, "the first tool that finds something is the last"


def test_the_tests_that_it_chooses_are_there():
    """The attention and the commit are chosen by names that tests/gpu really has."""
    text = SCRIPT.read_text()
    files = re.findall(r"tests/gpu/\w+\.py", text)
    (wanted,) = re.findall(r'chosen="\((.*)\) and not graph"', text)
    names = [
        node.name
        for file in files
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    for word in wanted.split(" or "):
        assert [name for name in names if word in name and "graph" not in name], word
    assert any("graph" in name for name in names), "else nothing need be left out"
