"""The interface of verifiers: their settings, requests and verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from forerun.core.batch import Candidates
from forerun.core.draft import Draft
from forerun.errors import ErrorKind
from forerun.ops.sampling import SamplingRules


@dataclass(slots=True, kw_only=True)
class VerifyRequest:
    """One sequence before the verifier.

    `first_row` is the row of the step's logits that follows the last committed token; node i of
    `draft` owns row `first_row + 1 + i`. `position` is the index, in the sequence, of the first
    token to decide: with `seed` it keys the noise, so the same seed gives the same token whatever
    was drafted. `output_ids` are the tokens generated so far, not copied; a verifier does not change them.
    """

    draft: Draft
    first_row: int
    rules: SamplingRules
    seed: int
    position: int
    output_ids: list[int]

    def path(self, node: int) -> list[int]:
        """The drafted tokens from the root to `node`, which is the last; none for node -1."""
        return [self.draft.token_ids[n] for n in self.draft.path(node)]


class Verdict(NamedTuple):
    """The accepted path of a draft and the one token of the target's own that follows it.

    `accepted` lists node indices from the root down. `error`, if set, says why this sequence could
    not be judged (a failing logits processor, say), and `error_kind` whose mistake that is; the rest is
    then meaningless.
    """

    accepted: tuple[int, ...]
    token_id: int
    error: str | None = None
    error_kind: ErrorKind | None = None


class Verifier(Protocol):
    """Decides which part of each draft stands.

    `is_lossless`: the output is distributed exactly as the target alone would write it.
    """

    is_lossless: bool

    def verify(
        self, logits: Tensor, judged: Sequence[VerifyRequest], candidates: Candidates | None = None
    ) -> list[Verdict | None]:
        """Judge every sequence of a step.

        Args:
            logits: [num_rows, vocab_size] fp32, the target's raw logits; not changed.
            judged: the sequences, each owning 1 + len(draft) rows of `logits`.
            candidates: those of all rows, at least one each, where the target found them.

        Returns:
            One verdict per sequence, in order. A sequence whose rules raise gets an error verdict. None
            leaves a sequence undecided: its grammar is not ready, and the next step must ask again, with
            the same draft.
        """
        ...


class VerifierConfig(Protocol):
    """A verifier's own settings: a frozen dataclass whose field names are the user's keys.

    Its `__post_init__` raises `ConfigError` for a value out of range.
    """

    def build(self, num_speculative_tokens: int, /) -> Verifier:
        """Make the verifier for drafts of at most `num_speculative_tokens` nodes."""
        ...
