"""How much is drafted for a step, and how much of it the step verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.core.draft import Draft
from forerun.core.stats import SpeculationStats
from forerun.core.step import StepRecord
from forerun.engine.regret import ChoiceAccount

Schedule = tuple[tuple[int, int, int], ...]
"""(first batch size, last batch size, K) in rising order; vLLM's num_speculative_tokens_per_batch_size."""


class SpeculationControl(Protocol):
    """Decides the length of drafts. Under matching no decision changes the text, only the speed."""

    @property
    def num_speculative_tokens(self) -> int:
        """The most nodes that any draft may have."""
        ...

    @property
    def min_survival(self) -> float:
        """The chance to stand that a node must have to be worth drafting now, as far as its drafter knows it."""
        ...

    def draft_limit(self, batch_size: int) -> int:
        """The most nodes to draft for a sequence after a step of `batch_size` running ones; 0: no drafter is asked."""
        ...

    def limit_of(
        self, sequence: SpeculationStats, limit: int, *, verifying: Draft, has_prediction: bool = False
    ) -> int:
        """The most nodes to draft for one sequence where the step's limit is `limit`.

        Args:
            sequence: what its drafts have come to.
            limit: what `draft_limit` said.
            verifying: what the step verifies of its draft, whose fate is not known yet.
            has_prediction: whether the client has said what text it expects.
        """
        ...

    def limit_of_forced(self, limit: int) -> int:
        """The most tokens to draft that a grammar forces, whatever drafts have come to, where the step's limit is `limit`."""
        ...

    def choose(
        self, drafts: Sequence[Draft], *, num_rows: int, num_sequences: int, num_context_tokens: int
    ) -> list[int]:
        """How many nodes of each draft a step shall verify.

        Args:
            drafts: the drafts of the step's sequences, some perhaps empty; unknown tokens where the
                executor alone has them.
            num_rows: the step's rows without them.
            num_sequences: the sequences that the step computes.
            num_context_tokens: what they have in the KV cache before it.
        """
        ...

    def observe(self, record: StepRecord) -> None:
        """Learn what a step drafted, what of it stood, and what it cost."""
        ...

    def choices(self) -> ChoiceAccount | None:
        """An account of what has been chosen so far, which counts no further; None where nothing is chosen."""
        ...


class VerifiesWholeDrafts:
    """What those controls have in common that verify all that is drafted, whatever comes of it."""

    __slots__ = ()

    @property
    def min_survival(self) -> float:
        """Zero: a length says it all."""
        return 0.0

    def limit_of(
        self,
        sequence: SpeculationStats,  # noqa: ARG002 - the signature is that of all controls
        limit: int,
        *,
        verifying: Draft,  # noqa: ARG002
        has_prediction: bool = False,  # noqa: ARG002
    ) -> int:
        """`limit`, whatever the sequence's drafts have come to."""
        return limit

    def limit_of_forced(self, limit: int) -> int:
        """`limit`: what a grammar forces is drafted as all else is."""
        return limit

    def choose(
        self,
        drafts: Sequence[Draft],
        *,
        num_rows: int,  # noqa: ARG002
        num_sequences: int,  # noqa: ARG002
        num_context_tokens: int,  # noqa: ARG002
    ) -> list[int]:
        """All of each draft."""
        return [len(draft.token_ids) for draft in drafts]

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn: lengths are given."""

    def choices(self) -> ChoiceAccount | None:
        """None: nothing is chosen."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLength(VerifiesWholeDrafts):
    """A fixed K, or a K by batch size.

    Gaps in the schedule and sizes past its end keep the K of the entry before (vLLM's rule).
    """

    num_speculative_tokens: int
    schedule: Schedule = ()

    def draft_limit(self, batch_size: int) -> int:
        """K for a step of `batch_size` sequences."""
        chosen = self.num_speculative_tokens
        for first, _, num_tokens in self.schedule:
            if first > batch_size:
                break
            chosen = min(num_tokens, self.num_speculative_tokens)
        return chosen
