"""The text of a running sequence: its index, the copies that it follows, and how its guesses fare."""

from __future__ import annotations

import math
from collections.abc import Sequence as Listing
from ctypes import addressof

from forerun.core.sequence import Sequence
from forerun.drafters.lookup.text_index import BREAK, LONGEST_MATCH, TextIndex
from forerun.drafters.margins import margin_class
from forerun.drafters.recycle_table import SaltContexts
from forerun.ops.native.structs import MOST_COMPUTED, MOST_RUNNERS_UP, LiveTextStruct

OWN_GRAMS = (3, 1)
"""Lengths (tokens) of the grams by which the own text is looked up."""

FIRST_CAPACITY = 256  # tokens


class LiveText:
    """What is kept of a running sequence; `struct` has what a step changes.

    `struct.copies` holds for the own text and for past answers where the copy goes on, and the length of the match
    before it: a copy is followed while it predicts right. `struct.lost_place` is where the last long copy of the own text
    went wrong (0: none is looked for), and `struct.num_since` how many tokens were written after the first other one. `struct.hits` and `struct.expected` count, discounted, how
    many guesses were right and how many the rates of all sequences had led to expect. `struct.computed` holds a chain that
    was computed for the text, `struct.margin_classes` and `struct.runners_up` how far ahead each of its tokens was and of
    what, `num_computed` counts its tokens, and `next_computed` says which of them is next at the text's end.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.num_outputs = 0  # output tokens of the sequence that are in the index
        self.contexts: SaltContexts | None = None
        self.index = TextIndex(OWN_GRAMS, capacity=FIRST_CAPACITY)
        self.past: TextIndex | None = None
        self.struct = LiveTextStruct(own=self.index.struct)
        self.index.struct = self.struct.own  # one state, not two: the struct above was copied
        self.address = addressof(self.struct)

    def reserve(self, num_tokens: int) -> bool:
        """Make room for so many tokens in all; return whether the index was made anew, empty."""
        if num_tokens < self.index.capacity:
            return False
        self.index = TextIndex(OWN_GRAMS, capacity=1 << (num_tokens + num_tokens // 4).bit_length())
        self.struct.own = self.index.struct
        self.index.struct = self.struct.own
        return True

    def guess(self, levels: Listing[Listing[int]], margins: Listing[float] | None = None) -> None:
        """Guess at a chain, too, which was computed for the text as it is: at each depth its token and then runners-up.

        `margins` are those of its tokens, as far as they are known.
        """
        struct, count = self.struct, min(len(levels), MOST_COMPUTED)
        for depth, level in enumerate(levels[:count]):
            margin = math.nan if margins is None or depth >= len(margins) else margins[depth]
            struct.margin_classes[depth] = margin_class(margin)
            struct.computed[depth] = level[0]
            beside = list(level[1 : 1 + MOST_RUNNERS_UP])
            struct.runners_up[depth][:] = beside + [BREAK] * (MOST_RUNNERS_UP - len(beside))
        struct.num_computed, struct.next_computed = count, 0

    def ending(self) -> list[int]:
        """The last tokens, at most `LONGEST_MATCH`."""
        end = self.index.struct.end
        last: list[int] = self.index.tokens[max(0, end - LONGEST_MATCH) : end].tolist()
        return last

    def copy_from(self, past: TextIndex | None) -> None:
        """Copy from these past answers from now on."""
        if past is not self.past:
            self.past = past
            self.struct.past = None if past is None else addressof(past.struct)
            self.struct.copies[1].place = self.struct.copies[1].match = 0

    def recycle_from(self, contexts: SaltContexts | None) -> None:
        """Take candidates from what was learnt for this salt from now on."""
        if contexts is not self.contexts:
            self.contexts = contexts
            self.struct.contexts = None if contexts is None else addressof(contexts.struct)
