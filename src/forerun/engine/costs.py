"""What a step costs: seconds by rows, sequences and context, fitted to the engine's own step times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

KINKS = (8, 12, 24, 48, 96)
"""Rows from which on another row may cost more: register tiles fill up, then arithmetic takes over from memory."""

JUMPS = (16, 32)
"""Rows that fill registers of sixteen rows: the next one takes as many registers again, however few of their rows it uses."""

PRIOR = (0.95, 0.012, 0.02, 0.02, 0.03, 0.0, 0.0, 0.0, 0.0, 0.01, 0.0001)
"""Cost of a step in steps of one row: at all, per row, per row from each kink on, at each jump, per sequence, per token of context.

What a processor with wide registers shows; the first hundred steps of an engine weigh more."""

MATRIX_PRIOR = (0.95, 0.012, 0.003, 0.0, 0.0, 0.01, 0.01, 0.1, 0.25, 0.01, 0.0001)
"""What one with matrix registers shows."""

GPU_PRIOR = (0.98, 0.0015, 0.0, 0.0, 0.001, 0.001, 0.0, 0.03, 0.04, 0.002, 0.00003)
"""What one shows whose memory is fast, but whose arithmetic is faster by far."""

PRIORS = {"amx": MATRIX_PRIOR, "triton": GPU_PRIOR, "triton, products by torch": GPU_PRIOR}
"""By the name of the kernels, of those for a CPU their level; others have `PRIOR`."""

PRIOR_DEVIATION = (0.3, 0.05, 0.05, 0.05, 0.05, 0.03, 0.03, 0.005, 0.005, 0.03, 0.0002)
"""How far each of these may be off, a jump also by half of itself.

A small jump by little: an engine that sees few numbers of rows would take the noise of their times for jumps that its
kernels have not."""

OF_JUMPS = slice(2 + len(KINKS), 2 + len(KINKS) + len(JUMPS))
SEQUENCE, CONTEXT_TOKEN = -2, -1  # places of their weights

NOISE = 0.1
"""Relative deviation of a step's time from what it costs: other programs, interrupts."""

NUM_FIRST_STEPS = 5  # whose median sets the unit, as the first touch memory that nobody has touched
MOST_ROWS = 1024  # of the table; beyond it costs go on in a straight line
FORGETTING = 0.03  # weight of a step in its bin, once the bin has seen many
LEVEL_WEIGHT = 0.05  # of a step in the running speed of the machine
MOST_BIN_WEIGHT = 30.0
FITTED_EVERY = 32  # steps
NUM_TRIALS, KNOWN_FOR = 3, 1024
"""Steps of a kind after which its cost is known, and steps after the last of them until it no longer is: machines change."""

EARLY_FITS = (4, 8, 16)


@dataclass(slots=True)
class _Bin:
    """Steps of about as many rows and sequences: how many, the number of the last one, and their means."""

    num_steps: int
    last_step: int
    rows: float
    sequences: float
    context: float
    cost: float


class StepCosts:
    """The cost of a step, in steps of one row; straight lines over its rows, with kinks and jumps.

    Steps with prompts teach nothing: their rows have no logits. Time is measured against the running
    speed of the machine, so that a change of it, for other programs or for heat, is not taken for a
    property of the steps that happen then. A time that cannot be (a clock that jumps) counts little or
    nothing.

    Args:
        weights: what an earlier fit gave, see `weights`.

    Raises:
        ValueError: there are more or fewer weights than features, or one is not finite.
    """

    def __init__(self, weights: Sequence[float] = PRIOR) -> None:
        if len(weights) != len(PRIOR) or not all(map(math.isfinite, weights)):
            raise ValueError(f"got weights {list(weights)!r:.200}; must be {len(PRIOR)} finite numbers")
        self._prior = np.array(weights, dtype=np.float64)
        self._deviation = np.array(PRIOR_DEVIATION)
        self._deviation[OF_JUMPS] = np.maximum(self._deviation[OF_JUMPS], 0.5 * np.abs(self._prior[OF_JUMPS]))
        self._bins: dict[tuple[int, int], _Bin] = {}
        self._first: list[float] = []  # of the first steps, seconds over predicted cost
        self._unit = 0.0  # seconds of a step of cost 1, as the machine runs now; 0: not known yet
        self.num_steps = 0  # that it was fitted to
        self._use(self._prior)

    @property
    def weights(self) -> tuple[float, ...]:
        """What the next engine on this machine may begin with."""
        return tuple(self._weights.tolist())

    @property
    def unit(self) -> float:
        """Seconds of a step of cost 1, as the machine runs now; 0 before the first steps."""
        return self._unit

    def of_rows(self, num_rows: int) -> float:
        """The part of a step's cost that its rows cause."""
        by_rows = self._by_rows
        if num_rows < MOST_ROWS:
            return by_rows[num_rows]
        return by_rows[-1] + (num_rows - MOST_ROWS + 1) * (by_rows[-1] - by_rows[-2])

    def between(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """The same for each number of rows from `first` to before `last`."""
        if last <= MOST_ROWS:
            return self._curve[first:last]
        return np.array([self.of_rows(num_rows) for num_rows in range(first, last)])

    def beside_rows(self, num_sequences: int, num_context_tokens: int) -> float:
        """The part that depends on who takes part, not on how much is drafted."""
        return self._per_sequence * num_sequences + self._per_context_token * num_context_tokens

    def knows(self, num_rows: int, num_sequences: int) -> bool:
        """Whether a few steps of about as many rows and sequences were observed, the last one not long ago."""
        found = self._bins.get((_bucket(num_rows), _bucket(num_sequences)))
        return found is not None and found.num_steps >= NUM_TRIALS and self.num_steps - found.last_step <= KNOWN_FOR

    def observe(self, *, num_rows: int, num_sequences: int, num_context_tokens: int, seconds: float) -> None:
        """Learn from a step without prompt rows."""
        if not 0.0 < seconds < math.inf:
            return
        predicted = self.of_rows(num_rows) + self.beside_rows(num_sequences, num_context_tokens)
        if not self._unit:
            self._first.append(seconds / predicted)
            if len(self._first) == NUM_FIRST_STEPS:
                self._unit = median(self._first)
            return
        # one step says little: it moves neither the speed nor the bin further than a factor of two would
        ratio = min(max(seconds / (predicted * self._unit), 0.5), 2.0)
        self._note(num_rows, num_sequences, num_context_tokens, predicted * ratio)
        self._unit *= 1.0 + LEVEL_WEIGHT * (ratio - 1.0)
        self.num_steps += 1
        if self.num_steps % FITTED_EVERY == 0 or self.num_steps in EARLY_FITS:
            self._fit()

    def _note(self, num_rows: int, num_sequences: int, num_context_tokens: int, cost: float) -> None:
        key = _bucket(num_rows), _bucket(num_sequences)
        found = self._bins.get(key)
        if found is None:
            self._bins[key] = _Bin(1, self.num_steps, num_rows, num_sequences, num_context_tokens, cost)
            return
        found.num_steps += 1
        found.last_step = self.num_steps
        weight = max(1.0 / found.num_steps, FORGETTING)
        found.rows += weight * (num_rows - found.rows)
        found.sequences += weight * (num_sequences - found.sequences)
        found.context += weight * (num_context_tokens - found.context)
        found.cost += weight * (cost - found.cost)

    def _fit(self) -> None:
        """The likeliest weights, by the bins' means and the prior: ridge regression around the prior."""
        bins = list(self._bins.values())
        features = np.array([step_features(one.rows, one.sequences, one.context) for one in bins])
        costs = np.array([one.cost for one in bins])
        precision = np.array([min(one.num_steps, MOST_BIN_WEIGHT) for one in bins]) / (NOISE * costs) ** 2
        deviation = 1.0 / np.square(self._deviation)
        left = (features.T * precision) @ features + np.diag(deviation)
        right = (features.T * precision) @ costs + deviation * self._prior
        self._use(_likeliest(left, right))

    def _use(self, weights: npt.NDArray[np.float64]) -> None:
        self._weights = weights
        self._curve = row_curve(weights, least=1e-3)
        by_rows: list[float] = self._curve.tolist()
        self._by_rows = by_rows
        self._per_sequence = max(0.0, float(weights[SEQUENCE]))
        self._per_context_token = max(0.0, float(weights[CONTEXT_TOKEN]))


def _likeliest(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The weights that solve left @ weights = right, where no jump, no sequence and no token of context can save time.

    One that would is left out and the others are solved for again, since theirs would make up for what it takes off.
    """
    can_save = np.ones(len(right), dtype=bool)
    can_save[[*range(OF_JUMPS.start, OF_JUMPS.stop), SEQUENCE, CONTEXT_TOKEN]] = False
    used = np.ones(len(right), dtype=bool)
    while True:
        weights = np.zeros(len(right))
        weights[used] = np.linalg.solve(left[np.ix_(used, used)], right[used])
        possible = can_save | (weights >= 0.0)
        if possible.all():
            return weights
        used &= possible


def row_curve(weights: npt.NDArray[np.float64], *, least: float) -> npt.NDArray[np.float64]:
    """The part of a step's cost that its rows cause, for each number of rows from 0 to before `MOST_ROWS`.

    Another row never makes a step quicker, and no step costs less than `least`.
    """
    rows = np.arange(MOST_ROWS, dtype=np.float64)
    curve = weights[0] + weights[1] * rows
    for kink, weight in zip(KINKS, weights[2:], strict=False):
        curve += weight * np.maximum(rows - kink, 0.0)
    for jump, weight in zip(JUMPS, weights[2 + len(KINKS) :], strict=False):
        curve += weight * (rows > jump)
    rising: npt.NDArray[np.float64] = np.maximum.accumulate(np.maximum(curve, least))
    return rising


def step_features(rows: float, sequences: float, context: float) -> list[float]:
    """What the weights of a step's cost belong to, in the order of `PRIOR`."""
    by_rows = (*(max(0.0, rows - kink) for kink in KINKS), *(float(rows > jump) for jump in JUMPS))
    return [1.0, rows, *by_rows, sequences, context]


def _bucket(count: int) -> int:
    """Counts up to 32 as they are, larger ones in steps of an eighth."""
    return count if count <= 32 else 32 + int(8 * math.log2(count / 32))
