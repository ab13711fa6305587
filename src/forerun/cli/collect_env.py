"""`forerun collect-env`: the facts about the machine that a bug report needs."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forerun
from forerun.cli.command import command
from forerun.cli.console import spinner
from forerun.cli.options import JsonFlag
from forerun.core.cache_folder import cache_folder
from forerun.core.cpu_name import describe_processor
from forerun.errors import ForerunError
from forerun.models import store

if TYPE_CHECKING:
    from forerun.ops.cuda.system import CudaSystem

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
    """Name, cores and instruction sets."""
    fields = _colon_lines(Path("/proc/cpuinfo"))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "name": describe_processor(),
        "logical_cores": os.cpu_count(),
        "instruction_sets": " ".join(sorted(CPU_FLAGS.intersection(flags))) or "unknown",
    }


def _memory() -> dict[str, str]:
    fields = _colon_lines(Path("/proc/meminfo"))
    return {name: fields.get(key, "unknown") for name, key in (("total", "MemTotal"), ("available", "MemAvailable"))}


def _gpus() -> dict[str, Any]:
    import torch  # slow to import, and needed by this part alone

    from forerun.ops.cuda.system import InstalledCuda

    facts: dict[str, Any] = {
        "torch_threads": torch.get_num_threads(),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }
    return facts | gpu_facts(InstalledCuda(), folder=cache_folder())


def gpu_facts(system: CudaSystem, *, folder: Path) -> dict[str, str]:
    """What there is of GPUs, whether they can be used, and what would compute on them.

    Args:
        system: what is installed.
        folder: the cache, where tables of the kernels lie.
    """
    from forerun.config.device import choose_device
    from forerun.config.kernel_table import describe_table, find_table

    driver = system.driver_cuda
    facts = {
        "torch_cuda": system.torch_cuda or "none",
        "driver_cuda": "none" if driver is None else f"{driver[0]}.{driver[1]} at most",
    }
    for index in range(system.num_gpus):
        facts[f"cuda:{index}"] = str(system.gpu(index))
        try:
            choose_device(f"cuda:{index}", system)
            facts[f"cuda:{index} kernel table"] = describe_table(find_table(None, system, index, folder=folder))
        except ForerunError as error:
            facts[f"cuda:{index} cannot be used"] = str(error)
    if system.num_gpus:
        has_triton = system.triton is not None
        facts["kernels"] = (
            f"triton {system.triton} where they can compute the model, else torch" if has_triton else "torch; no triton"
        )
        facts["cuda_graphs"] = "on where triton's kernels compute, unless enforce_eager" if has_triton else "off"
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
