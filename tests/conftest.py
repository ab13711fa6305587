"""Settings that all tests share."""

import os
from pathlib import Path

import torch
from hypothesis import settings

from forerun.ops.native import library

torch.set_num_threads(1)

# triton reads it where it is first imported, by whichever test comes first; tests/cuda.py says what for.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# `make sanitize`, `make test-arm` and `make test-amx` test kernels that they have built into a folder of their own.
if folder := os.environ.get("FORERUN_TEST_KERNELS"):
    library.library_file = lambda name: Path(folder, f"libforerun_{name}.so")

# In CI the same examples each time, so that a red run can be repeated; at a desk new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("desk", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "desk")


def pytest_runtest_setup():
    """Each test draws the same numbers from torch, on as many threads, whatever ran before it.

    A target of several processes gives torch its threads back when it is collected, which may be tests later.
    """
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)  # alone it takes a hundredth of the time
