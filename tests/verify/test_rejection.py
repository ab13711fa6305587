"""Rejection with real noise: the output follows the target, even under an adversary."""

import math

import numpy as np
import pytest
import torch

from forerun.core.draft import Draft
from forerun.core.random_bits import Stream
from forerun.core.sampling_params import SamplingParams
from forerun.ops.sampling import SamplingRules, draw_token
from forerun.verify.base import VerifyRequest
from forerun.verify.block import BlockConfig
from forerun.verify.matching import MatchingConfig
from forerun.verify.rejection import RejectionConfig

NUM_BINS = 16  # narrow, so that noise shared between draft and residual shows
NUM_DRAWS = 6000
LIMIT = (NUM_BINS - 1) + 10 * math.sqrt(2 * (NUM_BINS - 1))
LOGITS = torch.randn(3, NUM_BINS, generator=torch.Generator().manual_seed(1)) * 1.5
RULES = SamplingRules(SamplingParams(), prompt_ids=[0], vocab_size=NUM_BINS)
CONFIGS = {"matching": MatchingConfig, "standard": RejectionConfig, "block": BlockConfig}


def first_tokens(config, *, parents, draft_stream=Stream.DRAFT, num_draws=NUM_DRAWS):
    """First token of many steps; nodes are drawn from minus the target's logits."""
    verifier, probs = config().build(2), (-LOGITS).softmax(-1)[list(range(len(parents)))]
    drawn = []
    for seed in range(num_draws):
        token_ids = tuple(
            draw_token(probs[node], seed=seed, position=1, stream=draft_stream, index=node)
            for node in range(len(parents))
        )
        judged = VerifyRequest(
            draft=Draft(token_ids, parents, probs), first_row=0, rules=RULES, seed=seed, position=1, output_ids=[]
        )
        verdict = verifier.verify(LOGITS, [judged])[0]
        drawn.append(token_ids[verdict.accepted[0]] if verdict.accepted else verdict.token_id)
    return drawn


def statistic(drawn):
    expected = LOGITS[0].double().softmax(-1).numpy() * len(drawn)
    counts = np.bincount(drawn, minlength=NUM_BINS)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("parents", [(-1, 0), (-1, -1)], ids=["chain", "siblings"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_output_follows_the_target_under_an_adversary(config, parents):
    assert statistic(first_tokens(config, parents=parents)) < LIMIT


def test_noise_shared_by_draft_and_residual_would_be_seen():
    shared = first_tokens(RejectionConfig, parents=(-1,), draft_stream=Stream.RECOVERY, num_draws=3 * NUM_DRAWS)
    assert statistic(shared) > LIMIT
