"""Torch's libraries are opened before torch is imported, and torch is none the wiser."""

from __future__ import annotations

import subprocess
import sys

import pytest

from forerun.cli import torch_libraries

OPEN_AND_IMPORT = """
import sys
from pathlib import Path
from forerun.cli.torch_libraries import begin_opening
begin_opening().join()
assert "torch" not in sys.modules
assert "libtorch_cpu.so" in Path("/proc/self/maps").read_text()
import torch
print(int((torch.eye(3) @ torch.ones(3)).sum()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="shared libraries of Linux")
def test_libraries_are_open_before_torch_is_imported_and_it_computes():
    ended = subprocess.run([sys.executable, "-c", OPEN_AND_IMPORT], capture_output=True, text=True, check=True)
    assert ended.stdout == "3\n"


def test_without_torch_nothing_is_opened(monkeypatch):
    monkeypatch.setattr(torch_libraries, "find_spec", lambda name: None)
    assert torch_libraries.begin_opening() is None


@pytest.mark.skipif(sys.platform != "linux", reason="shared libraries of Linux")
def test_libraries_that_are_not_there_are_left_to_torch(tmp_path):
    torch_libraries._open_libraries(tmp_path)
