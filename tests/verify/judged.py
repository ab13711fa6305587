"""Sequences before a verifier, made in one line."""

import torch

from forerun.core.draft import Draft
from forerun.core.sampling_params import SamplingParams
from forerun.ops.sampling import SamplingRules
from forerun.verify.base import VerifyRequest

VOCAB_SIZE = 8


def judged_of(
    draft=None, *, first_row=0, seed=0, position=5, output_ids=None, stop_ids=frozenset(), grammar=None, **params
):
    """A sequence with a vocabulary of `VOCAB_SIZE`; `params` are its sampling settings."""
    rules = SamplingRules(
        SamplingParams(**params), prompt_ids=[0], vocab_size=VOCAB_SIZE, stop_token_ids=stop_ids, grammar=grammar
    )
    return VerifyRequest(
        draft=draft or Draft(),
        first_row=first_row,
        rules=rules,
        seed=seed,
        position=position,
        output_ids=[] if output_ids is None else output_ids,
    )


def rows_preferring(*token_ids):
    """Logits [len(token_ids), VOCAB_SIZE] whose most likely tokens are `token_ids`."""
    rows = torch.zeros(len(token_ids), VOCAB_SIZE)
    rows[range(len(token_ids)), list(token_ids)] = 4.0
    return rows


def random_rows(num_rows, *, seed=0):
    """Logits [num_rows, VOCAB_SIZE], the same for the same seed."""
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
