"""Past answers that later sequences of the same cache salt are drafted from, within one budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from sys import getsizeof

import numpy as np
import numpy.typing as npt

from forerun.drafters.base import PoolArrays
from forerun.drafters.lookup.text_index import BREAK, BYTES_PER_TOKEN, TextIndex

PAST_GRAMS = (3,)
"""Length (tokens) of the grams by which past answers are looked up."""

FEWEST_TOKENS = 1024
OBJECTS_OF_AN_INDEX = 2048  # bytes, measured and rounded up

Extend = Callable[[TextIndex, Sequence[int] | npt.NDArray[np.int32]], None]
"""Appends tokens to an index: `TextIndex.extend` or its compiled twin."""


class PastAnswers:
    """An index of past answers for each cache salt; all together take at most `max_bytes`.

    A salt's index begins small and doubles while there is room; those of the salts that were used for longest ago
    make room for others. A full index forgets its oldest tokens.
    """

    def __init__(self, *, vocab_size: int, max_bytes: int, extend: Extend = TextIndex.extend) -> None:
        self.num_bytes = 0  # of all indexes, and of what holds them
        self._vocab_size = vocab_size
        self.max_bytes = max_bytes
        self._extend = extend
        self._indexes: OrderedDict[str | None, TextIndex] = OrderedDict()  # the salt used last comes last

    def of(self, salt: str | None) -> TextIndex | None:
        """The answers that sequences of this salt may see, or None if there are none."""
        return self._indexes.get(salt)

    def add(self, answer: Sequence[int], salt: str | None) -> None:
        """Keep an answer; of one longer than there is room for, its end."""
        if not len(answer):
            return
        index = self._with_room(salt, len(answer) + 1)
        if index is not None:
            self._extend(index, [*answer[-(index.capacity - 2) :], BREAK])

    def _with_room(self, salt: str | None, num_tokens: int) -> TextIndex | None:
        """The salt's index, with room for more tokens where the budget allows it; None where it allows no index."""
        index = self._indexes.get(salt)
        held = 0 if index is None else min(index.struct.end, index.capacity)
        wanted = max(FEWEST_TOKENS, 1 << (held + num_tokens).bit_length())
        while wanted > FEWEST_TOKENS and _bytes_of(wanted, salt) > self.max_bytes:
            wanted //= 2
        if _bytes_of(wanted, salt) > self.max_bytes:
            return None
        if index is None or wanted > index.capacity:
            larger = TextIndex(PAST_GRAMS, capacity=wanted)
            if index is not None:
                self._extend(larger, index.latest())
                self.num_bytes -= _bytes_of(index.capacity, salt)
            index = self._indexes[salt] = larger
            self.num_bytes += _bytes_of(wanted, salt)
        self._indexes.move_to_end(salt)
        while self.num_bytes > self.max_bytes:
            dropped, of_dropped = self._indexes.popitem(last=False)
            self.num_bytes -= _bytes_of(of_dropped.capacity, dropped)
        return index

    def to_arrays(self) -> dict[str | None, PoolArrays]:
        """Each salt's `tokens`, with a `BREAK` behind each answer; the salt used for longest ago first."""
        return {salt: {"tokens": index.latest().copy()} for salt, index in self._indexes.items()}

    def from_arrays(self, saved: Mapping[str | None, PoolArrays]) -> None:
        """Add the answers of `to_arrays`, within the budget.

        Raises:
            ValueError: the arrays are none that `to_arrays` gives for this vocabulary.
        """
        for arrays in saved.values():
            tokens = arrays["tokens"]
            if tokens.ndim != 1 or tokens.dtype != np.int32:
                raise ValueError(f"past answers: got {tokens.dtype} {list(tokens.shape)}; must be a row of int32")
            if ((tokens < BREAK) | (tokens >= self._vocab_size)).any():
                raise ValueError(f"past answers: token ids are not all from 0 to {self._vocab_size - 1}")
        for salt, arrays in saved.items():
            tokens = arrays["tokens"]
            for answer in np.split(tokens, np.flatnonzero(tokens == BREAK) + 1):
                self.add(answer[answer != BREAK].tolist(), salt)


def _bytes_of(capacity: int, salt: str | None) -> int:
    """The memory of an index and of what holds it."""
    return capacity * BYTES_PER_TOKEN + OBJECTS_OF_AN_INDEX + getsizeof(salt)
