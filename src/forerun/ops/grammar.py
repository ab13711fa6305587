"""The seam between sampling rules and what a request's text must match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Grammar(Protocol):
    """One sequence's grammar: which tokens may come next, a function of the text alone.

    A text is `output_ids`, which only grows from call to call, and a path of drafted tokens.
    """

    def allowed(self, output_ids: Sequence[int], path: Sequence[int] = ()) -> Tensor:
        """Which tokens may follow the text: [vocab_size] bool; after its end only the end again.

        Raises:
            RequestError: the grammar takes more work than it may.
        """
        ...

    def num_possible(self, output_ids: Sequence[int], path: Sequence[int]) -> int:
        """How many tokens of `path`, from its first on, the grammar allows; for cutting drafts."""
        ...

    def forced(self, output_ids: Sequence[int]) -> list[int]:
        """Tokens that spell what must come next; [] where there is a choice.

        A bet, though a good one: the same text may be spelled by other tokens.
        """
        ...
