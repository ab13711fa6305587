"""A tiny chat model on disk, loaded as the engine loads it, for tests of whole stages."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch

from forerun.build import load_target
from forerun.config.settings import EngineSettings
from tests.stand_in import save_stand_in


@functools.cache
def chat_model_folder():
    """Its folder, one for each test process."""
    return save_stand_in(Path(tempfile.mkdtemp()))


@functools.cache
def chat_model():
    """The model, loaded once for each test process."""
    folder = chat_model_folder()
    return load_target(folder, EngineSettings(model=str(folder), device="cpu"), torch.device("cpu"))
