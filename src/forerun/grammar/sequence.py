"""Follows one sequence through its grammar, drafts included."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from forerun.errors import RequestError
from forerun.grammar.compiler import CompiledGrammar, summary
from forerun.ops.grammar import GrammarNotReadyError


class SequenceGrammar:
    """One sequence's place in a compiled grammar; see `ops.grammar.Grammar`.

    One matcher moves to the text it is asked about, along drafted paths and back, so that a step down a
    draft costs one token. It never reads an end-of-text token: only the end can follow one.

    Matchers of the same grammar share the limits on work, so another sequence may use them up, or a
    draft that plain decoding would not have met. A sequence that meets a limit therefore goes on with a
    private matcher and takes no more drafts; a limit met there ends it. The private matcher compiles on
    another thread, and until it is ready the sequence is undecided: no other sequence waits for it.

    Args:
        compiled: the grammar.
        eos_mask: [vocab_size] bool, True for the tokens that end a text; shared, never changed.
        eos_token_ids: the same tokens.
    """

    def __init__(self, compiled: CompiledGrammar, *, eos_mask: Tensor, eos_token_ids: frozenset[int]) -> None:
        self._compiled = compiled
        self._matcher = compiled.shared_matcher()
        self._is_private = False
        self._compiling: Future[LLMatcher] | None = None
        self._has_spent_private = False  # a draft has: no path is read any more
        self._eos_mask = eos_mask
        self._eos_token_ids = eos_token_ids
        self._text: list[int] = []  # what the matcher has read
        self._num_committed = 0  # so much of it is output for good

    @property
    def takes_drafts(self) -> bool:
        """False once the sequence has met a limit: what is left of its work is for the text."""
        return not self._is_private and self._compiling is None

    def allowed(self, output_ids: Sequence[int], path: Sequence[int] = ()) -> Tensor:
        """Return which tokens may follow the text: [vocab_size] bool; after its end only the end again.

        Raises:
            GrammarNotReadyError: the private matcher is being compiled.
            RequestError: the grammar takes more work than it may.
        """
        if not self._eos_token_ids.isdisjoint(path):
            return self._eos_mask
        if path and self._has_spent_private:
            raise RequestError("structured_outputs: a draft takes too much work here; decode without it")
        if self._compiling is not None:
            self._take_private(self._compiling)
        mask = self._mask(output_ids, path)
        if not self._matcher.is_error():
            return mask
        if self._is_private and not path:
            raise RequestError(
                f"structured_outputs: the grammar takes too much work here ({summary(self._matcher.get_error())}); simplify it"
            )
        self._has_spent_private = self._is_private
        self._compiling = self._compiled.compile_private_matcher()
        raise GrammarNotReadyError(
            "structured_outputs: the grammar is compiled again for this sequence alone; ask again"
        )

    def num_possible(self, output_ids: Sequence[int], path: Sequence[int]) -> int:
        """Return how many tokens of `path`, from its first on, the grammar allows."""
        if not self.takes_drafts or not self._go_to(output_ids, ()):
            return 0
        num_possible = self._matcher.validate_tokens(list(path))
        return 0 if self._matcher.is_error() else num_possible

    def forced(self, output_ids: Sequence[int]) -> list[int]:
        """Return tokens that spell what must come next; [] where there is a choice."""
        if not self.takes_drafts or not self._go_to(output_ids, ()):
            return []
        token_ids = self._matcher.compute_ff_tokens()
        num_possible = self._matcher.validate_tokens(token_ids)  # not a special token whose text is to be spelled
        return [] if self._matcher.is_error() else token_ids[:num_possible]

    def _mask(self, output_ids: Sequence[int], path: Sequence[int]) -> Tensor:
        is_possible = self._go_to(output_ids, path)
        # computed in any case: only this call reports that a limit was met on the way
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        vocab_size = len(self._eos_mask)
        if not is_possible:
            return torch.zeros(vocab_size, dtype=torch.bool)
        spelling = self._compiled.spelling(self._matcher, bits)
        if spelling is not None:
            return torch.arange(vocab_size) == spelling
        mask = torch.from_numpy(np.unpackbits(bits, count=vocab_size, bitorder="little")).view(torch.bool)
        return mask if self._matcher.is_accepting() else mask & ~self._eos_mask

    def _go_to(self, output_ids: Sequence[int], path: Sequence[int]) -> bool:
        """Move the matcher to the end of a text; False where the grammar does not allow the text."""
        wanted = [*output_ids[self._num_committed :], *path]
        read = self._text[self._num_committed :]
        num_same = _num_same(read, wanted)
        if num_same < len(read):
            self._matcher.rollback(len(read) - num_same)
            del self._text[self._num_committed + num_same :]
        if num_same < len(wanted):
            num_read = self._matcher.try_consume_tokens(wanted[num_same:])
            self._text += wanted[num_same : num_same + num_read]
        self._num_committed = min(len(output_ids), len(self._text))
        return len(self._text) == len(output_ids) + len(path)

    def _take_private(self, compiling: Future[LLMatcher]) -> None:
        """Go on with the private matcher from the beginning of the text.

        Raises:
            GrammarNotReadyError: it is not compiled yet.
        """
        if not compiling.done():
            raise GrammarNotReadyError("structured_outputs: the grammar is still being compiled; ask again")
        self._matcher = compiling.result()
        self._is_private, self._compiling = True, None
        self._text = []
        self._num_committed = 0


def _num_same(some: Sequence[int], others: Sequence[int]) -> int:
    """Length of the beginning that two lists share."""
    num_same = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        num_same += 1
    return num_same
