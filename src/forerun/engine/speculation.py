"""How many draft tokens each sequence may get in the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.drafters.base import DraftRequest
from forerun.engine.generation import Generation

Schedule = tuple[tuple[int, int, int], ...]
"""(first batch size, last batch size, K) in rising order; vLLM's num_speculative_tokens_per_batch_size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationControl:
    """A fixed K, or a K by batch size; a request may ask for less, never for more.

    Gaps in the schedule and sizes past its end keep the K of the entry before (vLLM's rule).
    """

    num_speculative_tokens: int
    schedule: Schedule = ()

    def tokens_at(self, batch_size: int) -> int:
        """K for a step of `batch_size` sequences."""
        chosen = self.num_speculative_tokens
        for first, _, num_tokens in self.schedule:
            if first > batch_size:
                break
            chosen = min(num_tokens, self.num_speculative_tokens)
        return chosen

    def requests(self, generations: Sequence[Generation], *, batch_size: int) -> list[DraftRequest]:
        """Draft requests for those of `generations` that may be drafted for; K = 0 makes none."""
        limit = self.tokens_at(batch_size)
        if not limit:
            return []
        found = []
        for generation in generations:
            asked = generation.sequence.sampling.request_speculation.num_speculative_tokens
            num_tokens = limit if asked is None else min(limit, asked)
            # One place is the target's own token's: a draft deeper than the rest could never be used.
            depth = min(num_tokens, generation.max_length - len(generation.sequence) - 1)
            if depth > 0:
                slot = generation.slot
                found.append(
                    DraftRequest(
                        generation.sequence, num_tokens, depth, slot.num_computed, slot.block_ids, generation.rules
                    )
                )
        return found
