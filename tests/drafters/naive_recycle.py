"""A recycling table by its definition: a dict for each salt, and slots counted by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.drafters.base import VerifiedRows
from forerun.drafters.recycle_table import GAP_STEPS

Row = tuple[int, int, list[int], list[float]]  # previous token, token, candidates, logits


def verified(rows: Sequence[Row], salts: Sequence[tuple[int, int, str | None]] | None = None) -> VerifiedRows:
    """Rows as an executor hands them over; all of one sequence without a salt if none are given."""
    return VerifiedRows(
        token_ids=np.array([row[1] for row in rows], np.int64),
        previous_ids=np.array([row[0] for row in rows], np.int64),
        candidate_ids=np.array([row[2] for row in rows], np.int32).reshape(len(rows), -1),
        candidate_logits=np.array([row[3] for row in rows], np.float32).reshape(len(rows), -1),
        salts=[(0, len(rows), None)] if salts is None else salts,
    )


class UnboundedTable:
    """What a table knows that never has to forget."""

    def __init__(self) -> None:
        self.known: dict[tuple[str | None, int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def learn(self, rows: Sequence[Row], salt: str | None) -> None:
        for previous, token, candidates, logits in rows:
            gaps = tuple(min(255, round((logits[0] - logit) * GAP_STEPS)) for logit in logits)
            self.known[salt, -1, token] = tuple(candidates), gaps
            if previous >= 0:
                self.known[salt, previous, token] = tuple(candidates), gaps

    def look_up(
        self, previous: int, token: int, salt: str | None
    ) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
        if previous >= 0 and (salt, previous, token) in self.known:
            return (2, *self.known[salt, previous, token])
        if (salt, -1, token) in self.known:
            return (1, *self.known[salt, -1, token])
        return None
