"""Settings that all tests share."""

import gc
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from forerun.core.cache_folder import cache_folder
from forerun.ops.native import library, memory

LINKED = ("models", "peers")
"""What tests read of the user's cache folder, if it is there."""

torch.set_num_threads(1)

# Modules and tests, of which there are many, stay: walking them again and again takes half the time of collecting tests.
gc.disable()

# triton reads it where it is first imported, by whichever test comes first; tests/cuda.py says what for.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# `make sanitize`, `make test-arm` and `make test-amx` test kernels that they have built into a folder of their own.
if folder := os.environ.get("FORERUN_TEST_KERNELS"):
    library.library_file = lambda name: Path(folder, f"libforerun_{name}.so")

# Tests keep a hundred tiny models at hand, and a process that has reserved more than there is cannot fork.
memory.CHUNK = 16 << 20

# In CI the same examples each time, so that a red run can be repeated; at a desk new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("desk", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "desk")


def pytest_configure(config: pytest.Config) -> None:
    """What tests and their processes keep (packed weights, costs of steps) goes into a cache folder of their own.

    Pulled models are found through links. Processes of xdist have the folder of the process that started them.
    """
    if hasattr(config, "workerinput"):
        return
    own = tempfile.TemporaryDirectory(prefix="forerun-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(own.cleanup)
    for name in LINKED:
        if (found := cache_folder() / name).exists():
            Path(own.name, name).symlink_to(found.resolve())
    os.environ["FORERUN_CACHE"] = own.name


def pytest_collection_finish() -> None:
    """From here on the garbage collector walks what tests make, and nothing that was there before: a million objects.

    A test that calls `gc.unfreeze` has to freeze again.
    """
    gc.freeze()
    gc.enable()


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
