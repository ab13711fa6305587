"""Kernels that a program of this folder has triton compile, in a process of its own: the tests' own would interpret them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""By compute capability: KiB of shared memory that a block may have."""


def compiled_by(program: str, capability: int, cache: Path) -> list[dict]:
    """What was compiled: the kernel, instructions that it uses, bytes of shared memory, registers and stack of a thread."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    ended = subprocess.run(
        [sys.executable, "-m", f"tests.slow.{program}", str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]
