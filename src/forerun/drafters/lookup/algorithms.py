"""What a step asks of the look-ups, in plain Python; `ops.native.lookup` has it compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from forerun.drafters.base import VerifiedRows
from forerun.drafters.lookup.growing import grow
from forerun.drafters.lookup.guesses import settle, take
from forerun.drafters.lookup.hit_rates import HitRates
from forerun.drafters.lookup.live_text import LiveText
from forerun.drafters.lookup.text_index import TextIndex
from forerun.drafters.recycle_table import PlainRows, RowsToStore
from forerun.ops.native.library import best_kernels
from forerun.ops.native.lookup import DraftLimits, GrownTree, NativeLookup


class Lookup(Protocol):
    """What a step asks of the look-ups, for all sequences at once."""

    def extend(self, index: TextIndex, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Append tokens to an index."""
        ...

    def settle(self, text: LiveText) -> None:
        """Look up where the copies go on at the end of a text."""
        ...

    def take(self, texts: Sequence[LiveText], new_tokens: Sequence[Sequence[int]], rates: HitRates) -> None:
        """Learn from each text's newly committed tokens, and append them."""
        ...

    def grow(self, texts: Sequence[LiveText], limits: Sequence[DraftLimits], rates: HitRates) -> list[GrownTree]:
        """The best tree after each text."""
        ...

    def to_store(self, rows: VerifiedRows, num_candidates: int) -> RowsToStore:
        """A step's rows, ready to be stored in the recycle table with so many candidates."""
        ...


class PlainLookup:
    """The look-ups as they are defined, where there are no kernels."""

    def extend(self, index: TextIndex, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """See `Lookup`."""
        index.extend(token_ids)

    def settle(self, text: LiveText) -> None:
        """See `Lookup`."""
        settle(text)

    def take(self, texts: Sequence[LiveText], new_tokens: Sequence[Sequence[int]], rates: HitRates) -> None:
        """See `Lookup`."""
        for text, new in zip(texts, new_tokens, strict=True):
            take(text, new, rates)

    def grow(self, texts: Sequence[LiveText], limits: Sequence[DraftLimits], rates: HitRates) -> list[GrownTree]:
        """See `Lookup`."""
        return [grow(text, limit, rates) for text, limit in zip(texts, limits, strict=True)]

    def to_store(self, rows: VerifiedRows, num_candidates: int) -> RowsToStore:
        """See `Lookup`."""
        return PlainRows(rows, num_candidates)


def best_lookup() -> Lookup:
    """The compiled look-ups, or the plain ones where there are no kernels."""
    kernels = best_kernels()
    return PlainLookup() if kernels is None else NativeLookup(kernels)
