"""Interpreters of the environments that `python -m benchmarks.peers install` makes."""

from __future__ import annotations

import pytest

from benchmarks.peers.install import DEFAULT_FOLDER, InstallError, python_in


def interpreter_of(name):
    """The interpreter of a peer's or a tool's environment; the test is skipped where there is none."""
    try:
        return python_in(name, DEFAULT_FOLDER)
    except InstallError as error:
        pytest.skip(str(error))
