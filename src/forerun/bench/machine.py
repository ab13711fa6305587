"""Describes the machine, the package versions and the kernels of a measurement."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from forerun import __version__
from forerun.core.cpu_name import describe_processor

if TYPE_CHECKING:
    from os import PathLike

    import torch

    from forerun.llm import LLM


def describe_machine(device: torch.device) -> str:
    """One line: GPU if `device` is one, processor, cores and versions."""
    import torch  # not at module level: the load generator describes processors without torch

    others = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    gpu = f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" else ""
    return f"{gpu}{describe_processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, forerun {__version__}, {others}"


def machine_name(device: torch.device) -> str:
    """The machine, without the versions of what runs on it: GPU or processor, and cores."""
    return describe_machine(device).partition("; ")[0]


def describe_kernels(llm: LLM) -> str:
    """What computes the forward pass, and in how many threads, e.g. "native avx512bf16, 2 threads"; on a GPU by which table."""
    import torch

    arithmetic = describe_arithmetic(llm)
    if llm.kernels is not None:
        return f"{arithmetic}, {llm.kernels.num_threads} threads"
    if llm.has_device_layers or llm.device.type != "cpu":
        table = kernel_table(llm.device, llm.settings.kernel_table) if llm.has_device_layers else None
        return arithmetic if table is None else f"{arithmetic}, table {table}"
    return f"{arithmetic}, {torch.get_num_threads()} threads"


def kernel_table(device: torch.device, named: str | PathLike[str] | None) -> str | None:
    """The digest of the table by which a GPU's kernels cut their products; None: there is none, or no GPU.

    Args:
        device: that computes.
        named: a table's file, see `EngineSettings.kernel_table`.
    """
    if device.type != "cuda":
        return None
    from forerun.config.kernel_table import find_table
    from forerun.core.cache_folder import cache_folder
    from forerun.ops.cuda.system import InstalledCuda

    path = None if named is None else Path(named).expanduser()
    found = find_table(path, InstalledCuda(), device.index or 0, folder=cache_folder())
    return None if found is None else found[1].digest


def describe_arithmetic(llm: LLM) -> str:
    """What computes the forward pass, however many threads it has."""
    if llm.has_device_layers:
        products = ", products by torch" if llm.settings.device_matmul == "torch" else ""
        return ("Triton kernels" if llm.device.type == "cuda" else "formulas of the Triton kernels") + products
    if llm.kernels is None:
        return "torch"
    weights = f", {llm.settings.quantization} weights" if llm.settings.quantization else ""
    activations = f", int{llm.row_bits} activations" if llm.row_bits else ""
    return f"native {llm.kernels.level}{weights}{activations}"
