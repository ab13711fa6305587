"""A walk over the default model's texts in bf16 drafts what an engine verifies, greedy and sampled."""

from __future__ import annotations

import pytest

from forerun.bench.compare import make_engine
from forerun.bench.draft_walk import WALKED_AT_ONCE
from forerun.bench.prompts import WORKLOADS, encode_prompt
from forerun.bench.recording import record
from forerun.build import load_target
from forerun.config.settings import EngineSettings
from forerun.models.store import resolve_model
from tests.bench.verified_drafts import assert_same_drafts
from tests.native import needs_kernels

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs_kernels]

MODEL = "smollm2-135m"
NUM_TOKENS = 40
CONFIGS = {
    "int8": {"method": "self", "quantization": "int8", "num_speculative_tokens": 4, "draft_sample_method": "coupled"},
    "early-exit-tree": {"method": "self", "exit_layer": 24, "draft_tree": [3, 2]},
}


@pytest.fixture(scope="module")
def engine():
    """Makes an engine over the model, which is loaded once, and reads prompts for it."""
    settings = EngineSettings.from_keywords(MODEL, {"max_num_seqs": WALKED_AT_ONCE})
    target = load_target(resolve_model(MODEL), settings, settings.torch_device)
    prompts = {kind: [encode_prompt(target.tokenizer, texts[0])] for kind, texts in WORKLOADS.items()}
    longest = max(len(ids) for (ids,) in prompts.values()) + NUM_TOKENS

    def make(config):
        return make_engine("walked", target, settings, config, num_sequences=WALKED_AT_ONCE, longest=longest)

    return make, prompts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_walk_drafts_what_the_default_models_engine_verifies(engine, name, temperature):
    make, prompts = engine
    recording = record(make(None), prompts, max_tokens=NUM_TOKENS, temperatures=(temperature,))
    assert assert_same_drafts(make(CONFIGS[name]), make(CONFIGS[name]), recording, batch_size=2) > 20
