"""What the sampling rules ask of a grammar; `forerun.grammar` answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from forerun.errors import RequestError


class GrammarNotReadyError(RequestError):
    """A grammar has no answer in this step, but will have it in a later one.

    A verifier leaves the sequence undecided: the next step asks the same questions again.
    """


class Grammar(Protocol):
    """One sequence's place in its grammar: which tokens may come next.

    The answers are a function of the text alone. A text is `output_ids`, which only grows from call to
    call, followed by a path of drafted tokens.
    """

    @property
    def takes_drafts(self) -> bool:
        """Whether drafts may be proposed; False for a sequence that must not spend work on them."""
        ...

    def allowed(self, output_ids: Sequence[int], path: Sequence[int] = ()) -> Tensor:
        """Return which tokens may follow the text: [vocab_size] bool, not to be changed.

        After the end of the text only the end-of-text tokens are allowed.

        Raises:
            GrammarNotReadyError: the answer takes more than this step; ask again in the next one.
            RequestError: the grammar takes more work than it may.
        """
        ...

    def num_possible(self, output_ids: Sequence[int], path: Sequence[int]) -> int:
        """Return how many tokens of `path`, from its first on, the grammar allows; for cutting drafts."""
        ...

    def forced(self, output_ids: Sequence[int]) -> list[int]:
        """Return tokens that spell what must come next; [] where there is a choice.

        They are a bet, though a good one: other tokens may spell the same text.
        """
        ...
