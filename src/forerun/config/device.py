"""Which device computes, and whether the GPU and what drives it are fit for that."""

from __future__ import annotations

import functools
import logging
import os
import re

import torch

from forerun.errors import ConfigError
from forerun.ops.cuda.system import GPU, CudaSystem

logger = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
"""Ampere: the first with bf16 on tensor cores, for which the kernels are compiled in tests."""

TESTED_TRITON = ("3.6", "3.7")

OR_CPU = ", or set device='cpu'"
"""How the error ends that refuses a GPU; no remedy where a GPU is what it is about."""


def choose_device(name: str, system: CudaSystem) -> torch.device:
    """The device that the setting `device` names; "auto" takes a GPU where there is one that can be used.

    Raises:
        ConfigError: there is no such device, or the GPU, its driver or torch's build is not fit for it.
    """
    if name == "auto":
        return _best_device(system)
    found = re.fullmatch(r"cpu(?::0)?|cuda(?::(?P<index>0|[1-9]\d*))?", name, re.ASCII)
    if found is None:
        raise ConfigError(f"device: got {name!r}; may be auto, cpu, cuda or cuda:N")
    if name.startswith("cuda"):
        problem = _problem(system, int(found["index"] or 0))  # torch keeps eight bits of it
        if problem is not None:
            raise ConfigError(f"device: got {name!r}, but {problem}{OR_CPU}")
    return torch.device(name)


def check_triton(system: CudaSystem, *, needed_by: str) -> None:
    """Look whether the kernels can be compiled; a version that they are not tested with is warned of once.

    Args:
        system: what is installed.
        needed_by: the setting that needs triton.

    Raises:
        ConfigError: triton is not installed.
    """
    found = system.triton
    if found is None:
        raise ConfigError(
            f"{needed_by}: on a GPU it needs triton, which is not installed; pip install 'forerun[cuda]', or leave it out"
        )
    if ".".join(found.split(".")[:2]) not in TESTED_TRITON:
        _warn_once(
            f"triton {found} is not tested with these kernels, which are with {' and '.join(TESTED_TRITON)}: texts may differ "
            "under speculation; install one of those"
        )


def _best_device(system: CudaSystem) -> torch.device:
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not system.num_gpus and (system.driver_cuda is None or is_hidden):
        return torch.device("cpu")
    problem = _problem(system, 0)
    if problem is None:
        return torch.device("cuda")
    _warn_once(f"device: 'auto' takes the CPU, since {problem}; device='cpu' says so without this warning")
    return torch.device("cpu")


def _problem(system: CudaSystem, index: int) -> str | None:
    """Why a GPU cannot be used and what mends it; None: it can."""
    built_for, driver = system.torch_cuda, system.driver_cuda
    if built_for is None:
        return f'torch {system.torch} is built without CUDA; install its CUDA build (pytorch.org, "Start locally")'
    if driver is None and not system.num_gpus:
        return "no NVIDIA driver is found; install one, in a container give it the GPUs (docker run --gpus all)"
    if driver is not None and driver[0] < int(built_for.split(".")[0]):
        return (
            f"the NVIDIA driver runs CUDA {driver[0]}.{driver[1]} at most and torch {system.torch} is built for CUDA {built_for}; "
            f"update the driver, install a build of torch for CUDA {driver[0]}"
        )
    count = system.num_gpus
    if not count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        return f"the driver shows no GPU{hidden}; look what nvidia-smi lists"
    if index >= count:
        return (
            "there is 1 GPU; take cuda:0"
            if count == 1
            else f"there are {count} GPUs; take one of cuda:0 to cuda:{count - 1}"
        )
    return _too_old(system.gpu(index))


def _too_old(gpu: GPU) -> str | None:
    if gpu.capability >= LEAST_CAPABILITY:
        return None
    least, found = (".".join(map(str, capability)) for capability in (LEAST_CAPABILITY, gpu.capability))
    return f"{gpu.name} has compute capability {found} and {least} (Ampere) is the least; take a newer GPU"


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
