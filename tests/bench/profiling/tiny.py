"""A tiny engine and a tiny grid to profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.bench.profiling.grid import ProfileGrid
from forerun.bench.profiling.profiler import Profiler, ProfileTask
from forerun.config.settings import EngineSettings
from tests.engines import tiny_target

GRID = ProfileGrid(
    input_lengths=(4, 8, 16),
    num_sequences=(1, 3),
    contexts=(8, 24),
    draft_lengths=(0, 2),
    rounds=2,
    steps=1,
    num_texts=2,
    max_tokens=16,
)

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PROMPTS = {"a": [[7, 8, 9] * 4, [11, 12] * 5], "b": [[20, 21, 22, 23]]}


def settings() -> EngineSettings:
    return EngineSettings(
        model="tiny",
        block_size=4,
        num_gpu_blocks_override=700,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )


def profiler(folder: Path, **changes: Any) -> Profiler:
    parts: dict[str, Any] = {
        "settings": settings(),
        "configs": {"ngram": NGRAM},
        "prompts": PROMPTS,
        "grid": GRID,
    }
    return Profiler(target=tiny_target(), task=ProfileTask(**parts | changes), folder=folder)
