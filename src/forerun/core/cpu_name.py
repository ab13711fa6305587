"""The processor's name, by which measurements are told apart."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def describe_processor() -> str:
    """The processor's name from /proc/cpuinfo, or elsewhere from Python."""
    if CPUINFO.exists():
        for line in CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"
