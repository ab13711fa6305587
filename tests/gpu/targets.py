"""Models on the GPU for its tests."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch

from forerun.models.base import LoadedTarget
from forerun.models.loader import load_model
from tests.engines import EOS, VOCAB_SIZE
from tests.tiny_models import save_tiny_model


@functools.cache
def tiny_target_on_gpu(dtype=torch.bfloat16):
    """The model behind `tests.engines.tiny_target` on the first GPU."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_model(Path(folder), seed=1, vocab_size=VOCAB_SIZE)
        model = load_model(path, dtype=dtype, device=torch.device("cuda"))
    return LoadedTarget(model=model, tokenizer=None, eos_token_ids=frozenset({EOS}))
