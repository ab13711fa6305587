"""Torch's libraries are opened before torch is imported, and torch is none the wiser."""

from __future__ import annotations

import os
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

IMPORT_MEANWHILE = """
import importlib.machinery, sys
from forerun.cli import torch_libraries

def libraries():
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return {name for name, file in files.items() if file.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))}

torch_libraries.find_spec = lambda name: importlib.machinery.ModuleSpec("torch", None, origin="/no/torch/__init__.py")
torch_libraries.begin_opening().join()
loaded_first = libraries()
import forerun.cli.app, forerun.cli.generate
torch_libraries.import_meanwhile()
print(sorted(libraries() - loaded_first), "torch" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="shared libraries of Linux")
def test_what_is_imported_meanwhile_needs_neither_torch_nor_a_library_for_which_it_would_wait():
    ended = subprocess.run([sys.executable, "-c", IMPORT_MEANWHILE], capture_output=True, text=True, check=True)
    assert ended.stdout == "[] False\n"


@pytest.mark.parametrize("threads", [None, "3"])
def test_a_choice_of_numpys_threads_is_left_as_it_was(monkeypatch, threads):
    monkeypatch.delenv(torch_libraries.NUMPYS_THREADS, raising=False)
    if threads:
        monkeypatch.setenv(torch_libraries.NUMPYS_THREADS, threads)
    with torch_libraries._one_thread_for_numpy():
        assert os.environ[torch_libraries.NUMPYS_THREADS] == (threads or "1")
    assert os.environ.get(torch_libraries.NUMPYS_THREADS) == threads


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
