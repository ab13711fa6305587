"""On a GPU no text of a thousand differs from the plain one, greedy or seeded, whatever drafts.

The model is the tiny one of all tests, in bf16; its odds are flat, so that one bit changes a text.
`tests/test_lossless_texts.py` asks the same of a CPU with few prompts.
"""

from __future__ import annotations

import functools

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1800)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="needs triton: pip install 'forerun[cuda]'")
pytest.importorskip("transformers", reason="makes the tiny model")

from tests.gpu.targets import tiny_target_on_gpu  # noqa: E402
from tests.lossless_texts import DRAFTERS, differing, texts  # noqa: E402

COUNT = 1000
SETTINGS = {"device": "cuda", "device_step": True, "num_gpu_blocks_override": 8192}


@functools.cache
def plain(seeded):
    return texts(tiny_target_on_gpu(), "plain", COUNT, seeded=seeded, **SETTINGS)


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_text_of_a_thousand_differs_from_the_plain_one(name, seeded):
    assert differing(texts(tiny_target_on_gpu(), name, COUNT, seeded=seeded, **SETTINGS), plain(seeded)) == {}
