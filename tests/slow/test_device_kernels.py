"""A `DeviceExecutor` over the Triton kernels, in triton's interpreter: texts and drafts are those of the formulas."""

from __future__ import annotations

import pytest

from forerun import SamplingParams
from forerun.executor.device_part import DeviceFunctions
from tests.contract.drafters import CASES
from tests.contract.test_contract import PROMPTS
from tests.cuda import DEVICE
from tests.engines import tiny_llm

from forerun.ops.cuda.kernels import edits, ngram, sampling, steps  # isort: skip - tests.cuda comes first

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter needs tensors on the CPU"),
]

SAMPLING = [
    SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=[3, 4, 5], logprobs=1),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=2**63, max_tokens=6),
    SamplingParams(temperature=0, max_tokens=6, repetition_penalty=1.3, presence_penalty=0.2, logit_bias={3: 5.0}),
]


@pytest.mark.parametrize("case", ["ngram", "random-tree"])
def test_an_engine_over_the_kernels_gives_the_texts_and_drafts_of_one_over_the_formulas(case, monkeypatch):
    def outcome():
        config = CASES[case] | {"draft_confidence_threshold": 0.0} if case == "ngram" else CASES[case]
        llm = tiny_llm(config, device_step=True, verifies_all=True, max_num_seqs=3, max_num_batched_tokens=32)
        outputs = llm.generate(PROMPTS[:3], SAMPLING, use_tqdm=False)
        return [(one.outputs[0].token_ids, one.outputs[0].origins) for one in outputs], llm.stats.speculation

    expected = outcome()
    assert expected[1].num_draft_tokens > 5
    kernels = DeviceFunctions.of(edits=edits, ngram=ngram, sampling=sampling, steps=steps)
    monkeypatch.setattr(DeviceFunctions, "choose", lambda device: kernels)
    assert outcome() == expected
