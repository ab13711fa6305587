"""The processor's name, by which measurements are told apart."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def describe_processor() -> str:
    """The processor's name from /proc/cpuinfo, or elsewhere from Python.

    Virtual machines often name only the maker ("AMD EPYC" is Zen 3, 4 and 5), so x86's family and model numbers are in it.
    """
    first = CPUINFO.read_text().partition("\n\n")[0] if CPUINFO.exists() else ""
    of_first = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    name = of_first.get("model name") or platform.processor() or "unknown processor"
    if {"cpu family", "model"} <= of_first.keys():
        return f"{name} (family {of_first['cpu family']}, model {of_first['model']})"
    return name
