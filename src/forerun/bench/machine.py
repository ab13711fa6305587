"""The machine, the versions and the kernels that a measurement was taken with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import torch

from forerun.bench.processor import describe_processor
from forerun.llm import LLM


def describe_machine(device: torch.device) -> str:
    """Processor (and GPU, if that is what computes), cores and versions, in one line."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("forerun", "torch", "transformers"))
    gpu = f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" else ""
    return f"{gpu}{describe_processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, {packages}"


def describe_kernels(llm: LLM) -> str:
    """What computes the forward pass, e.g. "native avx512bf16, 2 threads"."""
    if llm.kernels is None:
        threads = f", {torch.get_num_threads()} threads" if llm.device.type == "cpu" else ""
        return f"torch{threads}"
    weights = f", {llm.settings.quantization} weights" if llm.settings.quantization else ""
    return f"native {llm.kernels.level}{weights}, {llm.kernels.num_threads} threads"
