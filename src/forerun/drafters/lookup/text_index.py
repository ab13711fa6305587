"""An index of one text, or of many: where what follows any gram was seen last.

Tokens lie in a ring; the places behind grams lie in one direct-mapped hash table, without tags: a place that is
found is compared with the tokens before it, so that a collision costs a draft and never makes a wrong match.
Both are flat arrays, which the compiled twin of these functions (`ops.native.lookup`) reads and writes as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from forerun.ops.native.structs import TextIndexStruct

BREAK = -1
"""Ends a text of the ring, and lies where the next token will; it equals no token, so no match and no copy crosses it."""

LONGEST_MATCH = 33
"""Tokens that are compared before a place; longer matches count as this long."""

BYTES_PER_TOKEN = 12  # int32: one of `tokens`, two of `places`
MIXER = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, for Fibonacci hashing
WORD = 0xFFFFFFFFFFFFFFFF


class TextIndex:
    """A ring of tokens, and for each gram of `gram_sizes` the latest place behind it.

    A *place* is where in the ring a gram's continuation begins; 0 means none. A gram is filed when a token follows
    it, so the end of a text does not match itself. Once `capacity` (a power of two) tokens are in, each new token
    takes the place of the oldest. The longest gram found wins, so sizes come in falling order; there are one or two.
    """

    def __init__(self, gram_sizes: Sequence[int], *, capacity: int) -> None:
        self.gram_sizes = tuple(gram_sizes)
        self.tokens: npt.NDArray[np.int32] = np.full(capacity, BREAK, dtype=np.int32)
        self.places: npt.NDArray[np.int32] = np.zeros(2 * capacity, dtype=np.int32)
        self.struct = TextIndexStruct(
            tokens=self.tokens.ctypes.data,
            places=self.places.ctypes.data,
            mask=capacity - 1,
            shift=64 - (2 * capacity - 1).bit_length(),
            first_size=gram_sizes[0],
            second_size=gram_sizes[1] if len(gram_sizes) > 1 else 0,
        )
        self._tokens = self.tokens.data  # reads single tokens faster than the array
        self._places = self.places.data

    @property
    def capacity(self) -> int:
        """The most tokens that it holds, with the one `BREAK` at its end."""
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return self.tokens.nbytes + self.places.nbytes

    def latest(self) -> npt.NDArray[np.int32]:
        """The tokens in the ring, oldest first, each text but the last with the `BREAK` after it: [n]"""
        end, mask = self.struct.end, self.struct.mask
        if end <= mask:
            return self.tokens[:end]
        return np.concatenate([self.tokens[(end & mask) + 1 :], self.tokens[: end & mask]])

    def extend(self, token_ids: Iterable[int] | npt.NDArray[np.int32]) -> None:
        """Append tokens; a `BREAK` among them ends a text."""
        struct, tokens, places = self.struct, self._tokens, self._places
        mask, end, text_start = struct.mask, struct.end, struct.text_start
        for token_id in token_ids:
            for size in self.gram_sizes:
                if end - text_start >= size and token_id != BREAK:
                    places[self._slot([tokens[at & mask] for at in range(end - size, end)])] = end & mask
            tokens[end & mask] = token_id
            end += 1
            tokens[end & mask] = BREAK
            if token_id == BREAK:
                text_start = end
        struct.end, struct.text_start = end, text_start

    def look_up(self, ending: Sequence[int]) -> int:
        """The latest place behind the longest gram that is the end of `ending`; 0 if there is none."""
        tokens, mask = self._tokens, self.struct.mask
        for size in self.gram_sizes:
            if len(ending) < size:
                continue
            gram = list(ending[-size:])
            place = self._places[self._slot(gram)]
            if place and gram == [tokens[at & mask] for at in range(place - size, place)]:
                return place
        return 0

    def match_length(self, place: int, ending: Sequence[int]) -> int:
        """The number of tokens before `place`, at most `LONGEST_MATCH`, that equal the last ones of `ending`."""
        tokens, mask = self._tokens, self.struct.mask
        length = 0
        while length < min(LONGEST_MATCH, len(ending)) and tokens[(place - 1 - length) & mask] == ending[-1 - length]:
            length += 1
        return length

    def token_at(self, place: int) -> int:
        """The token at a place, `BREAK` where no token follows."""
        token_id: int = self._tokens[place & self.struct.mask]
        return token_id

    def _slot(self, gram: Sequence[int]) -> int:
        """The slot of `places` that belongs to a gram."""
        mixed = (len(gram) * MIXER) & WORD
        for token_id in gram:
            mixed = ((mixed ^ token_id) * MIXER) & WORD
            mixed ^= mixed >> 32
        shift: int = self.struct.shift
        return mixed >> shift
