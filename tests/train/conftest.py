"""Fixtures of the tests of trained heads."""

import os

import pytest

from tests.train.workshop import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory):
    """The target and the heads, trained once for all processes of the run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained-heads"
    folder.mkdir(exist_ok=True)
    return Workshop(folder)
