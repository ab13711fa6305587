"""Measures what drafting costs: time per drafted token, and the host's time per step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from forerun.core.sampling_params import SamplingParams
from forerun.llm import LLM

NUM_PATTERN_TOKENS = 32
NUM_PATTERNS = 4
NUM_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingCost:
    """The costs of one short generation after its first token; ratios without a denominator are None."""

    speculative: str
    num_steps: int
    num_draft_tokens: int
    milliseconds_per_draft_token: float | None
    draft_token_share: float | None  # of T(1), a pass over one row
    draft_milliseconds_per_step: float
    host_milliseconds_per_step: float  # all but the forward pass and drafting; on a GPU, with the wait for the pass
    forward_milliseconds_per_step: float
    acceptance_rate: float | None  # accepted / drafted
    acceptance_length: float | None  # tokens per step, bonus included

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON."""
        return asdict(self)


def measure_drafting(llm: LLM, one_row_milliseconds: float, *, num_tokens: int = NUM_TOKENS) -> DraftingCost:
    """Decode greedily after a repetitive prompt, in which prompt lookup finds matches.

    A first run warms up; prefill, the drafter's too, is not counted. `one_row_milliseconds` is T(1), which the
    cost of a drafted token is divided by.
    """
    vocab_size = llm.executor.model.vocab_size
    pattern = torch.randint(vocab_size, (NUM_PATTERN_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    for salt in ("warm-up", "measured"):
        deltas = llm.stream({"prompt_token_ids": pattern * NUM_PATTERNS, "cache_salt": salt}, sampling)
        next(deltas)
        llm.reset_stats()
        for _ in deltas:
            pass
    times, counts = llm.stats.times, llm.stats.speculation
    per_step = 1e3 / times.num_steps
    per_token = 1e3 * times.draft / counts.num_draft_tokens if counts.num_draft_tokens else None
    return DraftingCost(
        speculative=llm.speculative.describe(),
        num_steps=times.num_steps,
        num_draft_tokens=counts.num_draft_tokens,
        milliseconds_per_draft_token=per_token,
        draft_token_share=None if per_token is None else per_token / one_row_milliseconds,
        draft_milliseconds_per_step=times.draft * per_step,
        host_milliseconds_per_step=times.host_overhead * per_step,
        forward_milliseconds_per_step=times.forward * per_step,
        acceptance_rate=counts.acceptance_rate,
        acceptance_length=counts.acceptance_length,
    )
