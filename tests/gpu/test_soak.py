"""Ten minutes of requests of all kinds on a GPU, after which its memory is what it was.

SOAK_SECONDS says otherwise. `tests/test_device_soak.py` runs the same on a CPU for a second.
"""

from __future__ import annotations

import os

import pytest
import torch

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600 + 2 * SECONDS)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="needs triton: pip install 'forerun[cuda]'")
pytest.importorskip("transformers", reason="makes the tiny model")

from tests.contract.drafters import CASES  # noqa: E402
from tests.device_soak import Soak  # noqa: E402
from tests.engines import tiny_llm  # noqa: E402
from tests.gpu.targets import tiny_target_on_gpu  # noqa: E402

DRAFTERS = ["ngram", "recycle", "eagle3-dynamic-tree", "draft-model"]
MOST_GROWTH = 1 << 20


def test_memory_returns_after_every_round(capsys):
    for name in DRAFTERS:
        llm = tiny_llm(CASES[name], target=tiny_target_on_gpu(), device="cuda", device_step=True, max_num_seqs=16)
        soak = Soak(llm, torch.cuda.memory_allocated, most_growth=MOST_GROWTH)
        soak.run(SECONDS / len(DRAFTERS))
        with capsys.disabled():
            print(
                f"\n{name}: {soak.num_requests} requests in {soak.num_rounds} rounds, {soak.held[-1] >> 10} KiB are held"
            )
        assert soak.failures == []
