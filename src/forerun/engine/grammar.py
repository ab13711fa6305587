"""Follows one sequence through its grammar, drafts included."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.engine.grammar_compiler import CompiledGrammar, brief
from forerun.errors import RequestError


class SequenceGrammar:
    """One sequence's place in a compiled grammar; see `ops.grammar.Grammar`.

    One matcher goes where it is asked about, along drafted paths and back, so that a step down a
    draft costs one token. The end of the text is not fed to it: what follows is clear.

    The limits on work that copies share may be met by another sequence, or for a draft that plain
    decoding would not have met. So a sequence that meets them goes on with a matcher of its own and
    without drafts; meeting them again ends it.
    """

    def __init__(self, compiled: CompiledGrammar, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._compiled = compiled
        self._matcher = compiled.matcher()
        self._is_alone = False
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._only_end = torch.zeros(vocab_size, dtype=torch.bool)
        self._only_end[sorted(eos_token_ids)] = True
        self._text: list[int] = []  # what the matcher has read
        self._num_committed = 0  # so much of it is output for good

    def allowed(self, output_ids: Sequence[int], path: Sequence[int] = ()) -> Tensor:
        """Which tokens may follow the text: [vocab_size] bool; after its end only the end again.

        Raises:
            RequestError: the grammar takes more work than it may.
        """
        if not self._eos_token_ids.isdisjoint(path):
            return self._only_end
        mask = self._mask(output_ids, path)
        if self._matcher.is_error() and not self._is_alone:
            self._go_alone()
            mask = self._mask(output_ids, path)
        if self._matcher.is_error():
            raise RequestError(
                f"structured_outputs: the grammar takes too much work here ({brief(self._matcher.get_error())}); simplify it"
            )
        return mask

    def num_possible(self, output_ids: Sequence[int], path: Sequence[int]) -> int:
        """How many tokens of `path`, from its first on, the grammar allows."""
        if self._is_alone or not self._go_to(output_ids, ()):
            return 0
        num_possible = self._matcher.validate_tokens(list(path))
        return 0 if self._matcher.is_error() else num_possible

    def forced(self, output_ids: Sequence[int]) -> list[int]:
        """Tokens that spell what must come next; [] where there is a choice."""
        if self._is_alone or not self._go_to(output_ids, ()):
            return []
        token_ids = self._matcher.compute_ff_tokens()
        return [] if self._matcher.is_error() else token_ids

    def _mask(self, output_ids: Sequence[int], path: Sequence[int]) -> Tensor:
        is_possible = self._go_to(output_ids, path)
        # asked for in any case: it is here that the matcher tells whether the limits were met on the way
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if not is_possible:
            return torch.zeros(self._vocab_size, dtype=torch.bool)
        mask = torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little")).view(torch.bool)
        return mask if self._matcher.is_accepting() else mask & ~self._only_end

    def _go_to(self, output_ids: Sequence[int], path: Sequence[int]) -> bool:
        """Bring the matcher to the end of a text; False where the grammar does not let it."""
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

    def _go_alone(self) -> None:
        self._compiled.is_exhausted = True
        self._matcher = self._compiled.matcher_alone()
        self._is_alone = True
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
