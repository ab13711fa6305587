"""What a step costs: seconds by rows, sequences and context, fitted to the engine's own step times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

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

EXPERTS_PRIOR = (0.6, 0.22, 0.08, 0.0, 0.05, 0.0, 0.0, 0.0, 0.0, 0.18, 0.0001)
"""What a mixture of experts shows: each row reads experts of its own, until most of them are read."""

PRIORS = {"amx": MATRIX_PRIOR, "triton": GPU_PRIOR, "triton, products by torch": GPU_PRIOR}
"""By the name of the kernels, of those for a CPU their level; others have `PRIOR`."""

PRIOR_DEVIATION = (0.3, 0.05, 0.05, 0.05, 0.05, 0.03, 0.03, 0.005, 0.005, 0.03, 0.0002)
"""How far each of these may be off, a jump also by half of itself.

A small jump by little: an engine that sees few numbers of rows would take the noise of their times for jumps that its
kernels have not."""

OF_JUMPS = slice(2 + len(KINKS), 2 + len(KINKS) + len(JUMPS))
SEQUENCE, CONTEXT_TOKEN = -2, -1  # places of their weights

FIRST_DEVIATION, FIRST_STEPS, LEAST_DEVIATION = 0.3, 32, 0.02
"""Deviation of log(a step's time over that of the step before it) from what both cost: what is assumed, as many steps' word
that counts as, and the least that is believed. A machine whose speed swings says little with each step."""

NUM_FIRST_STEPS = 5  # whose median sets the unit, as the first touch memory that nobody has touched
LEAST_COST = 1e-3  # of a step
MOST_WEIGHT = 1e3  # that can be believed
MOST_ROWS = 1024  # of the table; beyond it costs go on in a straight line
FORGETTING = 0.999  # weight of what earlier steps said with each new one, since machines change
LEVEL_WEIGHT = 0.05  # of a step in the running speed of the machine
MOST_CHANGE = math.log(2.0)
"""What one step may say, at most, of the speed or of what its rows cost: it may have been interrupted."""

SURPRISE = math.log(1.5)
"""A step that takes so much more or less than it should is learnt from at once."""

FITTED_EVERY = 32  # steps
NUM_TRIALS, KNOWN_FOR = 3, 1024
"""Steps of a kind after which its cost is known, and steps after the last of them until it no longer is: machines change."""

EARLY_FITS = (4, 8, 16)


class _Step(NamedTuple):
    """A step: what it computed, and how long it took."""

    num_rows: int
    num_sequences: int
    num_context_tokens: int
    seconds: float


class StepCosts:
    """The cost of a step, in steps of one row; straight lines over its rows, with kinks and jumps.

    Steps with prompts teach nothing: their rows have no logits. A step is compared with the one before it: by how much it
    took longer depends on what both computed, and hardly on the speed of the machine, which other programs and heat
    change by a factor of two within a second. So the curve comes of such ratios alone, and the speed (`unit`) of all else.
    A time that cannot be (a clock that jumps) counts little or nothing.

    Args:
        weights: what an earlier fit gave, see `weights`.

    Raises:
        ValueError: there are more or fewer weights than features, or one cannot be.
    """

    def __init__(self, weights: Sequence[float] = PRIOR) -> None:
        if len(weights) != len(PRIOR) or not all(0.0 <= weight <= MOST_WEIGHT for weight in weights):
            raise ValueError(
                f"got weights {list(weights)!r:.200}; must be {len(PRIOR)} numbers from 0 to {MOST_WEIGHT:g}"
            )
        self._prior = np.array(weights, dtype=np.float64)
        self._deviation = np.array(PRIOR_DEVIATION)
        self._deviation[OF_JUMPS] = np.maximum(self._deviation[OF_JUMPS], 0.5 * np.abs(self._prior[OF_JUMPS]))
        self._products = np.zeros((len(weights), len(weights)))  # of the slopes of steps' log(time over time before)
        self._evidence = np.zeros(len(weights))  # the slopes times what they were to add up to
        self._deviating = np.array((FIRST_STEPS * FIRST_DEVIATION**2, FIRST_STEPS))  # squares, and how many they are
        self._steps: list[_Step] = []  # since the last fit, and the one before them
        # by rows and sequences: how many steps, and the number of the last one
        self._kinds: dict[tuple[int, int], tuple[int, int]] = {}
        self._of_one = 1.0  # cost of a step of one row, about
        self._first: list[float] = []  # of the first steps, seconds over predicted cost
        self._unit = 0.0  # seconds of a step of cost 1, as the machine runs now; 0: not known yet
        self.num_steps = 0  # that it was fitted to
        self._use(self._prior)

    @property
    def weights(self) -> tuple[float, ...]:
        """What the next engine on this machine may begin with, in steps of one row: ratios leave the scale open."""
        return tuple((self._weights / self._of_one).tolist())

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

    def between(self, first: int, last: int) -> list[float]:
        """The same for each number of rows from `first` to before `last`."""
        if last <= MOST_ROWS:
            return self._by_rows[first:last]
        return [self.of_rows(num_rows) for num_rows in range(first, last)]

    def cheapest_after(self, num_rows: int, most: int) -> float:
        """What one of up to `most` further rows costs at least, when they share what they cost together."""
        found = self._cheapest.get((num_rows, most))
        if found is None:
            first, *costs = self.between(num_rows, num_rows + most + 1)
            found = min((cost - first) / count for count, cost in enumerate(costs, 1))
            self._cheapest[num_rows, most] = found
        return found

    def beside_rows(self, num_sequences: int, num_context_tokens: int) -> float:
        """The part that depends on who takes part, not on how much is drafted."""
        return self._per_sequence * num_sequences + self._per_context_token * num_context_tokens

    def knows(self, num_rows: int, num_sequences: int) -> bool:
        """Whether a few steps of about as many rows and sequences were observed, the last one not long ago."""
        num_steps, last_step = self._kinds.get((_bucket(num_rows), _bucket(num_sequences)), (0, 0))
        return num_steps >= NUM_TRIALS and self.num_steps - last_step <= KNOWN_FOR

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
        kind = _bucket(num_rows), _bucket(num_sequences)
        num_of_kind, _ = self._kinds.get(kind, (0, 0))
        self._kinds[kind] = num_of_kind + 1, self.num_steps
        self._steps.append(_Step(num_rows, num_sequences, num_context_tokens, seconds))
        change = min(max(math.log(seconds / (predicted * self._unit)), -MOST_CHANGE), MOST_CHANGE)
        self._unit *= 1.0 + LEVEL_WEIGHT * (math.exp(change) - 1.0)
        self.num_steps += 1
        if self.num_steps % FITTED_EVERY == 0 or self.num_steps in EARLY_FITS or abs(change) > SURPRISE:
            self._fit()

    def _fit(self) -> None:
        """The likeliest weights, by the prior and by each step's time over that of the step before it.

        log(time / time before) is linear in the weights around the last fit, so that this is ridge regression around the prior.
        """
        if len(self._steps) < 2:
            return
        steps, self._steps = self._steps, self._steps[-1:]
        features = np.array([step_features(*step[:3]) for step in steps])
        costs = np.maximum(features @ self._weights, LEAST_COST)
        seconds = np.array([step.seconds for step in steps])
        slopes = np.diff(features / costs[:, None], axis=0)
        beyond = np.clip(np.diff(np.log(seconds / costs)), -MOST_CHANGE, MOST_CHANGE)
        kept = FORGETTING ** len(beyond)
        self._deviating = kept * self._deviating + (beyond @ beyond, len(beyond))
        squares, num_squares = self._deviating
        variance = max(squares / num_squares, LEAST_DEVIATION**2)
        self._products = kept * self._products + slopes.T @ slopes
        self._evidence = kept * self._evidence + slopes.T @ (beyond + slopes @ self._weights)
        prior = np.diag(1.0 / np.square(self._deviation))
        weights = _likeliest(self._products / variance + prior, self._evidence / variance + prior @ self._prior)
        self._use(weights)
        self._of_one = max(float(weights @ step_features(1, 1, 0)), LEAST_COST)

    def _use(self, weights: npt.NDArray[np.float64]) -> None:
        self._weights = weights
        by_rows: list[float] = row_curve(weights, least=LEAST_COST).tolist()
        self._by_rows = by_rows
        self._cheapest: dict[tuple[int, int], float] = {}  # as of these weights
        self._per_sequence = max(0.0, float(weights[SEQUENCE]))
        self._per_context_token = max(0.0, float(weights[CONTEXT_TOKEN]))


def _likeliest(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The weights that solve left @ weights = right, none below 0: nothing saves time, and rows never become cheaper.

    One that would is left out and the others are solved for again, since theirs would make up for what it takes off.
    """
    used = np.ones(len(right), dtype=bool)
    while True:
        weights = np.zeros(len(right))
        weights[used] = np.linalg.solve(left[np.ix_(used, used)], right[used])
        if (weights >= 0.0).all():
            return weights
        used &= weights >= 0.0


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
