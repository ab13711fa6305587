"""`make demo-plan` behind its profile: every command is one that forerun takes, and a target that is missed ends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plan.profiles import fake_profile

SCRIPT = Path(__file__).parents[1] / "scripts" / "demo_plan.sh"
FORERUN = f"""#!/bin/sh
[ "$1" = models ] || exec {sys.executable} -c 'import sys; from forerun.cli.app import main; sys.exit(main(sys.argv[1:]))' "$@"
"""


def demo(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the demo with a profile that is there already, and no download."""
    fake_profile(folder / "demo" / "profile")
    (folder / "bin").mkdir()
    (folder / "bin" / "forerun").write_text(FORERUN)
    (folder / "bin" / "forerun").chmod(0o755)
    (folder / "bin" / "python").symlink_to(sys.executable)
    return subprocess.run(
        ["sh", SCRIPT, folder / "demo"],
        env=os.environ | {"BIN": str(folder / "bin")} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_demo_ends_with_files_for_three_systems(tmp_path: Path) -> None:
    done = demo(tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("plan/plan.json", "forerun/serve.sh", "kubernetes/forerun.yaml", "vllm/serve.sh"):
        assert (tmp_path / "demo" / name).is_file()
    assert "the day by" in done.stdout


def test_a_target_that_no_plan_meets_ends_the_demo(tmp_path: Path) -> None:
    done = demo(tmp_path, SLA="ttft=1s,itl=1ms")
    assert done.returncode == 1
    assert "No plan meets ttft=1s,itl=1ms on this machine" in done.stderr
    assert "INFEASIBLE" in done.stdout
    assert not (tmp_path / "demo" / "forerun").exists()
