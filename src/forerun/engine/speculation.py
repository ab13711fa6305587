"""How many draft tokens each sequence may get in the next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from forerun.core.step import StepRecord
from forerun.engine.generation import Generation

Schedule = tuple[tuple[int, int, int], ...]
"""(first batch size, last batch size, K) in rising order; vLLM's num_speculative_tokens_per_batch_size."""


class SpeculationControl(Protocol):
    """Decides the length of drafts. Under matching no decision changes the text, only the speed."""

    @property
    def num_speculative_tokens(self) -> int:
        """The most nodes that any draft may have."""
        ...

    def draft_limit(self, generation: Generation, *, batch_size: int) -> int:
        """The most nodes to draft for a sequence in a step of `batch_size` running ones; 0: none."""
        ...

    def observe(self, record: StepRecord) -> None:
        """Learn what a step drafted, what of it stood, and what it cost."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLength:
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

    def draft_limit(self, generation: Generation, *, batch_size: int) -> int:
        """K, or what the request asks for if that is less."""
        limit = self.tokens_at(batch_size) if self.schedule else self.num_speculative_tokens
        if not limit:
            return 0
        asked = generation.spec.sampling.request_speculation.num_speculative_tokens
        return limit if asked is None else min(limit, asked)

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn: the length is fixed."""
