"""`forerun collect-env`: the facts about the machine that a bug report needs."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import forerun
from forerun.cli.command import command
from forerun.cli.loading import spinner
from forerun.cli.options import JsonFlag
from forerun.models import store

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "gguf",
    "numpy",
    "cyclopts",
    "rich",
)

CPU_FLAGS = frozenset(
    (
        *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni"),
        *("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
        *("amx_tile", "amx_bf16", "amx_int8"),
        *("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
    )
)
"""Instruction sets that decide which kernels can run."""


@command
def collect_env(*, json_output: JsonFlag = False) -> None:
    """Print versions, processor, memory and GPUs, for a bug report.

    Environment variables, host name, user name and package settings are left out.

    Args:
        json_output: Print one line of JSON for machines, and nothing else, on standard output.

    Examples:
        forerun collect-env
        forerun collect-env --json
    """
    with spinner("Collecting"):
        report = collect()
    print(json.dumps(report) if json_output else as_text(report))


def collect() -> dict[str, Any]:
    """All facts, by section."""
    return {
        "versions": _versions(),
        "system": _system(),
        "cpu": _cpu(),
        "memory": _memory(),
        "gpu": _gpus(),
        "models": {model.name: model.state for model in store.list_models()},
    }


def as_text(report: dict[str, Any]) -> str:
    """Sections of indented `name: value` lines."""
    lines = []
    for section, facts in report.items():
        lines.append(section)
        lines += [f"  {name}: {value}" for name, value in facts.items()]
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    found = {"forerun": forerun.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _system() -> dict[str, str]:
    return {
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "compiler": _first_line("c++", "--version"),
    }


def _cpu() -> dict[str, Any]:
    """Name, cores and instruction sets, from /proc/cpuinfo on Linux."""
    fields = _colon_lines(Path("/proc/cpuinfo"))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "name": fields.get("model name") or platform.processor() or "unknown",
        "logical_cores": os.cpu_count(),
        "instruction_sets": " ".join(sorted(CPU_FLAGS.intersection(flags))) or "unknown",
    }


def _memory() -> dict[str, str]:
    fields = _colon_lines(Path("/proc/meminfo"))
    return {name: fields.get(key, "unknown") for name, key in (("total", "MemTotal"), ("available", "MemAvailable"))}


def _gpus() -> dict[str, Any]:
    import torch  # slow to import, and needed by this part alone

    facts: dict[str, Any] = {
        "torch_cuda": torch.version.cuda or "none",
        "torch_threads": torch.get_num_threads(),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        facts[f"cuda:{index}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, capability {gpu.major}.{gpu.minor}"
    return facts


def _colon_lines(path: Path) -> dict[str, str]:
    """The `name : value` lines of a file, the first of each name; empty without the file."""
    found: dict[str, str] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    return found


def _first_line(*command: str) -> str:
    """The first line that a program prints, or "none" if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return "none"
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return next(iter(result.stdout.splitlines()), "none")
