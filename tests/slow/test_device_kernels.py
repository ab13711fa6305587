"""A `DeviceExecutor` over the Triton kernels, in triton's interpreter: texts and drafts are those of the formulas."""

from __future__ import annotations

import pytest
import torch

from forerun import SamplingParams
from forerun.drafters.neural.device import ChainFunctions
from forerun.drafters.neural.device_trees import TreeFunctions
from forerun.executor.device_computation import DeviceFunctions
from forerun.models.decoder import build_decoder
from forerun.models.on_device import DeviceParts
from forerun.ops.cuda.functions import LayerFunctions
from tests.contract.drafters import CASES
from tests.contract.test_contract import PROMPTS
from tests.cuda import DEVICE
from tests.engines import tiny_llm
from tests.models.paged_run import PagedRun
from tests.models.random_decoders import CPU, random_source
from tests.models.test_families import TOKEN_IDS
from tests.ops.native.passes import tree_mask
from tests.tiny_models import DENSE_FAMILIES

from forerun.ops.cuda.kernels import attention, chains, edits, layers, matmul, ngram, sampling, steps, trees  # isort: skip - tests.cuda comes first

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter needs tensors on the CPU"),
]

FEW_PROGRAMS = {"LEAST_CHUNK": 64, "BLOCK_KEYS": 32}  # the interpreter takes its time for each

SAMPLING = [
    SamplingParams(temperature=0, max_tokens=6, allowed_token_ids=[3, 4, 5], logprobs=1),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=2**63, max_tokens=6),
    SamplingParams(temperature=0, max_tokens=6, repetition_penalty=1.3, presence_penalty=0.2, logit_bias={3: 5.0}),
]


@pytest.fixture
def kernels(monkeypatch):
    """Call it, and engines are over the kernels."""

    def use():
        functions = DeviceFunctions.of(edits=edits, ngram=ngram, sampling=sampling, steps=steps)
        monkeypatch.setattr(DeviceFunctions, "choose", lambda device: functions)
        of_layers = LayerFunctions.of(attention=attention, layers=layers, matmul=matmul, are_kernels=True)
        monkeypatch.setattr(LayerFunctions, "choose", lambda device, matmul="kernels": of_layers)
        of_chains = ChainFunctions.of(chains)
        monkeypatch.setattr(ChainFunctions, "choose", lambda device: of_chains)
        of_trees = TreeFunctions.of(trees=trees, sampling=sampling)
        monkeypatch.setattr(TreeFunctions, "choose", lambda device: of_trees)
        for name, value in FEW_PROGRAMS.items():
            monkeypatch.setattr(attention, name, value)
        monkeypatch.setattr(matmul, "tiles_of", lambda *_: matmul.Tiles(outputs=128, inputs=32, splits=2))

    return use


CHANGES = {
    "ngram": {"draft_confidence_threshold": 0.0},
    "eagle-tree": {"draft_tree": [2, 2], "draft_sample_method": "coupled"},
    "eagle3-dynamic-tree": {"draft_tree": {"top_k": 2, "depth": 3}, "num_speculative_tokens": 4},
    "medusa-tree": {"draft_sample_method": "coupled"},
    "mlp-speculator-tree": {"draft_tree": [2, 2], "draft_sample_method": "coupled"},
}
"""Of a case's configuration: drafts of few passes, and of every kind."""


COUNTS = {
    "ngram": 3,
    "random-tree": 2,
    "eagle3": 1,
    "draft-model-tree": 1,
    "eagle-tree": 2,
    "eagle3-dynamic-tree": 1,
    **dict.fromkeys(("pard", "peagle", "dflash", "medusa", "mlp-speculator"), 1),
    "pard-tree": 1,
    "peagle-dynamic-tree": 1,
    "dflash-tree": 1,
    "medusa-tree": 2,
    "medusa-dynamic-tree": 1,
    "mlp-speculator-tree": 2,
}


@pytest.mark.parametrize(("case", "count"), COUNTS.items())
def test_an_engine_over_the_kernels_gives_the_texts_and_drafts_of_one_over_the_formulas(case, count, kernels):
    def outcome():
        config = CASES[case] | CHANGES.get(case, {})
        llm = tiny_llm(config, device_step=True, verifies_all=True, max_num_seqs=3, max_num_batched_tokens=32)
        outputs = llm.generate(PROMPTS[:count], SAMPLING[:count], use_tqdm=False)
        return [(one.outputs[0].token_ids, one.outputs[0].origins) for one in outputs], llm.stats.speculation

    expected = outcome()
    assert expected[1].num_draft_tokens > 3
    kernels()
    assert outcome() == expected


@pytest.mark.parametrize("architecture", DENSE_FAMILIES)
def test_layers_of_every_family_are_computed_by_the_kernels_as_by_the_formulas(architecture, kernels):
    model = build_decoder(*random_source(architecture, torch.float32), dtype=torch.float32, device=CPU)

    def logits():
        parts = DeviceParts(LayerFunctions.choose(CPU), max_length=64)
        run = PagedRun(parts.decoder(model), attention=parts.attention())
        tree = tree_mask([-1, 0, 0, 1])
        return torch.cat([run.feed(TOKEN_IDS[:9]).logits, run.try_tree(TOKEN_IDS[9:13], tree).logits])

    expected = logits()
    kernels()
    torch.testing.assert_close(logits(), expected, atol=1e-4, rtol=1e-4)


def test_bits_of_a_row_on_the_kernels_are_its_own(kernels):
    kernels()
    model = build_decoder(*random_source("Gemma2ForCausalLM", torch.float32), dtype=torch.float32, device=CPU)
    parts = DeviceParts(LayerFunctions.choose(CPU), max_length=64)
    model = parts.decoder(model)
    runs = [PagedRun(model, attention=parts.attention()) for _ in range(2)]
    together = runs[0].feed(TOKEN_IDS[:7]).logits
    alone = torch.cat([runs[1].feed(TOKEN_IDS[i : i + 1]).logits for i in range(7)])
    assert torch.equal(alone, together)
