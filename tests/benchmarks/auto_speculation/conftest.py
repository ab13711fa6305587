"""A small target, a workload for it, and a runner of both."""

from __future__ import annotations

import pytest

from benchmarks.auto_speculation.pieces import PieceFile
from benchmarks.auto_speculation.run import Runner
from benchmarks.auto_speculation.workloads import Request, Workload
from forerun.bench import instruments
from forerun.config.settings import EngineSettings
from forerun.core.sampling_params import SamplingParams
from tests.engines import tiny_target

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setitem(instruments.BUFFER_BYTES, "cpu", 1 << 16)


@pytest.fixture
def workload():
    """Three prompts, one at a time."""
    prompts = [[7, 8, 9] * 4, [11, 12] * 5, [20, 21, 22, 23]]
    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    return Workload(name="code", groups=[[Request(prompt=prompt, sampling=sampling)] for prompt in prompts])


@pytest.fixture
def runner(tmp_path):
    return Runner(
        target=tiny_target(),
        settings=EngineSettings(model="tiny", block_size=4),
        configs={"judged": NGRAM, "other": {**NGRAM, "num_speculative_tokens": 1}, "third": NGRAM},
        file=PieceFile(tmp_path / "run.json"),
        circumstances={"model": "tiny", "judged": "judged"},
    )
