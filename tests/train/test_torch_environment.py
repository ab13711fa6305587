"""Training sets what torch reads when it is imported, and leaves what the user has set."""

from __future__ import annotations

import os
import subprocess
import sys

from forerun.train.torch_environment import TORCH_ENVIRONMENT, set_torch_environment


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "active"})
    set_torch_environment()
    assert os.environ == {**TORCH_ENVIRONMENT, "OMP_WAIT_POLICY": "active"}


def test_the_command_is_imported_without_torch():
    code = "import sys, forerun.cli.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
