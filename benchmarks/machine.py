"""The machine and versions that a measurement was taken with, in one line."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe_machine() -> str:
    """Processor, cores, and the versions that matter."""
    cpu = platform.processor() or "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    versions = ", ".join(f"{name} {version(name)}" for name in ("forerun", "torch", "transformers"))
    return f"{cpu}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}"
