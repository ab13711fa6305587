"""What the rules change in one row of logits before anything is drawn from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.core.exact_math import Float32s
from forerun.ops.penalties import Int32s, LogitBias, PenalisedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEdits:
    """Changes of one row, in the order of the fields; csrc/sampling.h makes the same.

    `allowed`: ascending token ids, all others are out. `mask`: [vocab_size], False where a token is out. `forbidden`:
    tokens that are out. None or empty changes nothing.
    """

    allowed: Int32s | None = None
    mask: npt.NDArray[np.bool_] | None = None
    forbidden: Int32s | None = None
    bias: LogitBias | None = None
    penalised: PenalisedTokens | None = None

    def apply(self, row: Float32s) -> Float32s:
        """A copy of `row` [vocab_size] with all changes."""
        logits = self.before_penalties(row)
        if self.penalised is not None:
            self.penalised.apply(logits)
        return logits

    def before_penalties(self, row: Float32s) -> Float32s:
        """A copy of `row` with all changes but the last."""
        if self.allowed is None:
            logits = row.copy()
        else:
            logits = np.full_like(row, -math.inf)
            logits[self.allowed] = row[self.allowed]
        self.keep_mask(logits)
        if self.forbidden is not None:
            logits[self.forbidden] = -math.inf
        if self.bias is not None:
            self.bias.apply(logits)
        return logits

    def keep_mask(self, logits: Float32s) -> None:
        """Put -inf where the mask is False, in place."""
        if self.mask is not None:
            logits[~self.mask] = -math.inf
