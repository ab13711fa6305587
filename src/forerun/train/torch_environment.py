"""What torch reads of the environment when it is imported, set for training on a CPU."""

from __future__ import annotations

import os

TORCH_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "THP_MEM_ALLOC_ENABLE": "1"}
"""Torch's threads sleep while the kernels' compute, instead of waiting on the same cores, which costs a fifth of the tokens
per second; and large tensors lie in huge pages, as a step takes and gives back half a gigabyte."""


def set_torch_environment() -> None:
    """Set what is not set; it has no effect where torch has been imported before."""
    for name, value in TORCH_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
