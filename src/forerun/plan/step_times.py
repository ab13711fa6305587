"""What a step takes in seconds: by its rows, sequences, context and prompts, fitted to measured steps.

The terms are those of [engine/costs.py](../engine/costs.py), by which the engine chooses drafts; here they
are fitted in seconds to a profile's steps, and prompts have terms of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.core.file_version import is_version
from forerun.core.step import StepPlan
from forerun.engine.costs import MOST_ROWS, PRIOR, PRIOR_DEVIATION, row_curve, step_features
from forerun.errors import ConfigError
from forerun.plan.record_types import check_count

VERSION = 1

PROMPT_PRIOR = (0.0, 1e-5)
"""Cost of a row of logits, and of a pair of a prompt's token and one that it reads, in steps of one row."""

PROMPT_DEVIATION = (0.02, 5e-5)

CONTEXT_TERM = len(PRIOR) - 1  # place of the weight of a token of context; that of the weights' reading is 0

NOISE = 0.1  # relative deviation of a step's time from what it costs: other programs, interrupts
MOST_WEIGHT = 30  # steps of one shape beyond which more of them say no more
LEAST_BASE = 0.05  # of what a step usually costs at all
FAR = 2.0  # a step this many times as slow or quick as the median of its shape counts as if it were just that


class StepShape(NamedTuple):
    """What a step's time depends on; see `StepSample`, whose prompt is one, while here each has its own context.

    `num_prompt_pairs` are pairs of a prompt's token and one that it reads, itself included.
    """

    num_rows: int
    num_sequences: int
    num_context_tokens: int
    num_prompt_rows: int
    num_prompt_pairs: float

    @classmethod
    def of_plan(cls, plan: StepPlan) -> StepShape:
        """The shape of a planned step."""
        num_sequences = context = num_prompt_rows = 0
        pairs = 0.0
        for one in plan.sequences:
            if one.num_tail == 1 and one.reaches_end:
                num_sequences += 1
                context += one.start
            else:
                num_prompt_rows += one.num_tail
                pairs += _pairs(one.num_tail, one.start)
        num_rows = len(plan.rows.token_ids) - num_prompt_rows
        return cls(num_rows, num_sequences, context, num_prompt_rows, pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One measured step.

    `num_rows` are the rows whose logits are wanted: one for each sequence that decodes, and one for each
    token of its draft. `num_prompt_rows` come on top: tokens of prompts, none of which is judged but the
    last. `num_context_tokens` are in the KV cache of the sequences that decode, `num_prompt_context` of the
    one that reads its prompt, both before the step. `seconds` leave drafting out.
    """

    num_rows: int
    num_sequences: int
    num_context_tokens: int
    seconds: float
    num_prompt_rows: int = 0
    num_prompt_context: int = 0
    num_draft_tokens: int = 0
    energy_joules: float | None = None

    @classmethod
    def of_shape(cls, shape: StepShape, seconds: float) -> StepSample:
        """A measured step of at most one prompt, or of several that count as one of the mean context."""
        rows, pairs = shape.num_prompt_rows, shape.num_prompt_pairs
        return cls(
            num_rows=shape.num_rows,
            num_sequences=shape.num_sequences,
            num_context_tokens=shape.num_context_tokens,
            num_prompt_rows=rows,
            num_prompt_context=max(0, round(pairs / rows - (rows + 1) / 2)) if rows else 0,
            num_draft_tokens=shape.num_rows - shape.num_sequences,
            seconds=seconds,
        )

    def with_draft_length(self, length: int) -> StepSample:
        """The step as if each sequence had so many drafted tokens: so it is planned where nobody can say what was drafted."""
        num_drafted = self.num_sequences * length
        return replace(self, num_rows=self.num_sequences + num_drafted, num_draft_tokens=num_drafted)

    @property
    def shape(self) -> StepShape:
        """What its time depends on."""
        pairs = _pairs(self.num_prompt_rows, self.num_prompt_context)
        return StepShape(self.num_rows, self.num_sequences, self.num_context_tokens, self.num_prompt_rows, pairs)

    @property
    def counts(self) -> tuple[int, ...]:
        """All but what was measured."""
        return (
            self.num_rows,
            self.num_sequences,
            self.num_context_tokens,
            self.num_prompt_rows,
            self.num_prompt_context,
            self.num_draft_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """How far the model is from the shapes that it was fitted to, relative: median and 95th percentile."""

    num_shapes: int
    median: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRange:
    """The largest step that was measured; beyond it a model goes on in straight lines."""

    rows: int
    sequences: int
    context_tokens: int
    prompt_rows: int


class StepTimeModel:
    """Seconds of a step, as a sum of straight lines over its rows (with kinks), sequences, context and prompts.

    Args:
        weights: seconds of each term: those of `engine.costs.PRIOR`, then of a row of logits, then of a pair
            of a prompt's token and one before it that it reads. `fit` finds them.
        measured: how far they are known; None: not known.
        error: how well they fit; None: not known.

    Raises:
        ConfigError: there are more or fewer weights than terms, one is not finite, or an empty step takes no time.
    """

    def __init__(
        self, weights: Sequence[float], *, measured: MeasuredRange | None = None, error: FitError | None = None
    ) -> None:
        num_terms = len(PRIOR) + len(PROMPT_PRIOR)
        if len(weights) != num_terms or not all(map(math.isfinite, weights)) or weights[0] <= 0.0:
            raise ConfigError(
                f"step times: got weights {list(weights)!r:.200}; must be {num_terms} finite numbers, the first above 0: "
                "profile again"
            )
        self.weights = tuple(map(float, weights))
        self.measured = measured
        self.error = error
        curve = row_curve(np.array(self.weights[: len(PRIOR)]), least=1e-3 * weights[0])
        self._by_rows: list[float] = curve.tolist()
        self._per_row_beyond = self._by_rows[-1] - self._by_rows[-2]
        self._per_sequence, self._per_context_token, self._per_logits_row, self._per_pair = (
            max(0.0, weight) for weight in self.weights[-4:]
        )

    @classmethod
    def fit(cls, samples: Sequence[StepSample]) -> StepTimeModel:
        """The likeliest model by measured steps, and by what processors show where they say little.

        Steps of one shape count by their mean, outliers (other programs, interrupts) bounded; shapes by
        their relative deviation, so that short steps are fitted as well as long ones.

        Raises:
            ConfigError: a time is not above 0, or there are too few different steps; it says which are missing.
        """
        _check_samples(samples)
        shapes, means, counts = _means(samples)
        features = np.array([_features(one) for one in shapes])
        prior = np.array([*PRIOR, *PROMPT_PRIOR])
        unit = float(np.median(means / np.maximum(features @ prior, 1e-9)))  # seconds of a step of cost 1
        deviation = unit * np.array([*PRIOR_DEVIATION, *PROMPT_DEVIATION])
        precision = np.minimum(counts, MOST_WEIGHT) / (NOISE * means) ** 2
        weights = _solve(features, means, precision, prior * unit, deviation)
        found = cls(
            weights.tolist(),
            measured=MeasuredRange(
                rows=max(one.num_rows + one.num_prompt_rows for one in shapes),
                sequences=max(one.num_sequences for one in shapes),
                context_tokens=max(one.num_context_tokens for one in shapes),
                prompt_rows=max(one.num_prompt_rows for one in shapes),
            ),
        )
        predicted = np.array([found.of_shape(one) for one in shapes])
        errors = np.abs(predicted / means - 1.0)
        found.error = FitError(
            num_shapes=len(shapes), median=float(np.median(errors)), p95=float(np.quantile(errors, 0.95))
        )
        return found

    def seconds(
        self,
        *,
        num_rows: int,
        num_sequences: int,
        num_context_tokens: int,
        num_prompt_rows: int = 0,
        num_prompt_context: int = 0,
    ) -> float:
        """Seconds of a step, drafting left out; see `StepSample` for the arguments, prompts taken as one."""
        pairs = _pairs(num_prompt_rows, num_prompt_context)
        return self._seconds(num_rows, num_sequences, num_context_tokens, num_prompt_rows, pairs)

    def of_plan(self, plan: StepPlan) -> float:
        """Seconds of a planned step, drafting left out: what a simulated executor takes for it."""
        return self.of_shape(StepShape.of_plan(plan))

    def of_shape(self, shape: StepShape) -> float:
        """Seconds of a step of a shape, drafting left out."""
        return self._seconds(*shape)

    def ttft_seconds(self, prompt_tokens: int, cached: int = 0, *, max_num_batched_tokens: int | None = None) -> float:
        """Seconds from the start of a prompt's first step to its first token, on an engine with nothing else to do.

        Args:
            prompt_tokens: of the prompt.
            cached: how many of them the prefix cache has; the last one is always computed.
            max_num_batched_tokens: the most tokens of a step; None: the whole prompt in one.
        """
        start, seconds = min(cached, prompt_tokens - 1), 0.0
        most = prompt_tokens if max_num_batched_tokens is None else max_num_batched_tokens
        while start < prompt_tokens:
            rows = min(most, prompt_tokens - start)
            seconds += self._seconds(0, 0, 0, rows, _pairs(rows, start))
            start += rows
        return seconds

    def scaled(self, *, memory: float = 1.0, arithmetic: float = 1.0) -> StepTimeModel:
        """The model of a slower or quicker machine.

        Args:
            memory: how many times as long it takes to read the weights, once a step, and the context.
            arithmetic: how many times as long all takes that grows with rows and sequences.
        """
        for name, factor in (("memory", memory), ("arithmetic", arithmetic)):
            if not 0.0 < factor < math.inf:
                raise ConfigError(f"step times: got {name}={factor}; must be a number above 0")
        is_read = (0, CONTEXT_TERM)
        factors = [memory if term in is_read else arithmetic for term in range(len(self.weights))]
        weights = [factor * weight for factor, weight in zip(factors, self.weights, strict=True)]
        return StepTimeModel(weights, measured=self.measured, error=self.error)

    def to_json(self) -> dict[str, Any]:
        """The model as `from_json` reads it."""
        return {
            "version": VERSION,
            "weights": list(self.weights),
            "measured": None if self.measured is None else asdict(self.measured),
            "error": None if self.error is None else asdict(self.error),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> StepTimeModel:
        """The model of a record that `to_json` made.

        Raises:
            ConfigError: the record is of another version, lacks something, or is damaged.
        """
        try:
            if not is_version(record["version"], VERSION):
                raise ConfigError(f"step times: got version {record['version']!r}; must be {VERSION}: profile again")
            measured, error = record["measured"], record["error"]
            for name, count in (measured or {}).items():
                check_count("step times: measured", name, count, least=0, do="profile again")
            return cls(
                [float(weight) for weight in record["weights"]],
                measured=None if measured is None else MeasuredRange(**measured),
                error=None if error is None else FitError(**error),
            )
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise ConfigError(f"step times: the record is damaged ({problem!r}); profile again") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepTimeModel) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def _seconds(
        self, num_rows: int, num_sequences: int, num_context_tokens: int, num_prompt_rows: int, pairs: float
    ) -> float:
        all_rows = num_rows + num_prompt_rows
        by_rows = (
            self._by_rows[all_rows]
            if all_rows < MOST_ROWS
            else self._by_rows[-1] + (all_rows - MOST_ROWS + 1) * self._per_row_beyond
        )
        return (
            by_rows
            + self._per_sequence * num_sequences
            + self._per_context_token * num_context_tokens
            + self._per_logits_row * num_rows
            + self._per_pair * pairs
        )


def _features(shape: StepShape) -> list[float]:
    """What each of the weights counts."""
    all_rows = shape.num_rows + shape.num_prompt_rows
    by_rows = step_features(all_rows, shape.num_sequences, shape.num_context_tokens)
    return [*by_rows, shape.num_rows, shape.num_prompt_pairs]


def _pairs(num_rows: int, num_context: int) -> float:
    """Pairs of a prompt's rows and the tokens that each reads, itself included."""
    return num_rows * (num_context + (num_rows + 1) / 2)


def _solve(
    features: npt.NDArray[np.float64],
    seconds: npt.NDArray[np.float64],
    precision: npt.NDArray[np.float64],
    prior: npt.NDArray[np.float64],
    deviation: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Ridge regression around the prior, where no term beside the rows' kinks may save time, and no step is free.

    A term that would save time is left out, a base that would be less than a little is set to that; then the
    others are fitted again.
    """
    kept, fixed = np.ones(len(prior), dtype=bool), np.zeros(len(prior))
    least = np.full(len(prior), -np.inf)
    least[0] = LEAST_BASE * prior[0]
    least[len(PRIOR) - 2 :] = 0.0  # per sequence, per token of context, per row of logits, per pair
    while True:
        some, inverse = features[:, kept], 1.0 / np.square(deviation[kept])
        rest = seconds - features @ fixed
        left = (some.T * precision) @ some + np.diag(inverse)
        right = (some.T * precision) @ rest + inverse * prior[kept]
        weights = fixed.copy()
        weights[kept] = np.linalg.solve(left, right)
        too_low = kept & (weights < least)
        if not too_low.any():
            return weights
        kept &= ~too_low
        fixed[too_low] = least[too_low]


def _means(
    samples: Sequence[StepSample],
) -> tuple[list[StepShape], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The different shapes, the mean seconds of each, and how many steps it is over."""
    by_shape: dict[StepShape, list[float]] = {}
    for sample in samples:
        by_shape.setdefault(sample.shape, []).append(sample.seconds)
    means, counts = [], []
    for seconds in by_shape.values():
        middle = float(np.median(seconds))
        means.append(float(np.mean(np.clip(seconds, middle / FAR, middle * FAR))))
        counts.append(len(seconds))
    return list(by_shape), np.array(means), np.array(counts, dtype=np.float64)


def _check_samples(samples: Sequence[StepSample]) -> None:
    for number, sample in enumerate(samples):
        if not 0.0 < sample.seconds < math.inf:
            raise ConfigError(f"step times: sample {number} took {sample.seconds} s; must be a number above 0")
        if min(sample.counts) < 0 or sample.num_rows + sample.num_prompt_rows < 1:
            raise ConfigError(
                f"step times: sample {number} has counts {sample.counts}; must be 0 or more, with a row at least"
            )
    decoding = {(one.num_sequences, one.num_rows) for one in samples if not one.num_prompt_rows}
    missing = []
    if len(decoding) < 2:
        missing.append(
            f"steps without prompts, of 2 or more different numbers of sequences or of draft tokens (got {len(decoding)})"
        )
    if all(not one.num_prompt_rows for one in samples):
        missing.append("steps that read a prompt (got none)")
    if missing:
        raise ConfigError(f"step times: too few points; missing are {', and '.join(missing)}: measure more")


@dataclass(frozen=True, slots=True)
class DraftingSample:
    """A measured step: for how many sequences it drafted, how many tokens in all, and the seconds that drafting made it longer."""

    num_sequences: int
    num_draft_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingCost:
    """What it costs to draft after a step: at all, for each sequence, and for each drafted token of each sequence, in seconds.

    Raises:
        ConfigError: one is negative or not finite.
    """

    seconds_per_step: float = 0.0
    seconds_per_sequence: float = 0.0
    seconds_per_draft_token: float = 0.0

    def __post_init__(self) -> None:
        for name, value in self.to_json().items():
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"drafting: got {name}={value}; must be a number, at least 0")

    @classmethod
    def fit(cls, samples: Sequence[DraftingSample]) -> DraftingCost:
        """The likeliest cost by measured steps, no part below 0; on average it is what they took.

        Raises:
            ConfigError: nothing was measured.
        """
        if not samples:
            raise ConfigError("drafting: no step drafted anything; measure with longer texts, or leave the drafter out")
        features = np.array([(1.0, one.num_sequences, one.num_draft_tokens) for one in samples], dtype=np.float64)
        seconds = np.array([one.seconds for one in samples], dtype=np.float64)
        parts = _least_squares_from_zero(features, seconds)
        predicted, total = float((features @ parts).sum()), float(seconds.sum())
        scale = max(0.0, total / predicted) if predicted > 0.0 else 0.0
        per_step, per_sequence, per_token = (float(part * scale) for part in parts)
        return cls(seconds_per_step=per_step, seconds_per_sequence=per_sequence, seconds_per_draft_token=per_token)

    def seconds(self, num_sequences: int, num_draft_tokens: int) -> float:
        """Seconds to draft so many tokens in all for so many sequences, after one step."""
        return (
            self.seconds_per_step
            + self.seconds_per_sequence * num_sequences
            + self.seconds_per_draft_token * num_draft_tokens
        )

    def scaled(self, factor: float) -> DraftingCost:
        """What it costs where all takes so many times as long."""
        return DraftingCost(**{name: factor * value for name, value in self.to_json().items()})

    def to_json(self) -> dict[str, float]:
        """All parts by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> DraftingCost:
        """The cost of a record that `to_json` made.

        Raises:
            ConfigError: a part is missing or unknown, or no number.
        """
        try:
            return cls(**{name: float(value) for name, value in record.items()})
        except (AttributeError, TypeError, ValueError) as problem:
            raise ConfigError(f"drafting: the record is damaged ({problem}); profile again") from None


FREE_DRAFTING = DraftingCost()


def _least_squares_from_zero(
    features: npt.NDArray[np.float64], values: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The weights of a few features that fit best in least squares, none of them below 0: the best of all choices of features."""
    best, least = np.zeros(features.shape[1]), float(np.square(values).sum())
    for count in range(1, features.shape[1] + 1):
        for chosen in map(list, combinations(range(features.shape[1]), count)):
            weights = np.linalg.lstsq(features[:, chosen], values, rcond=None)[0]
            rest = float(np.square(values - features[:, chosen] @ weights).sum())
            if (weights >= 0.0).all() and rest < least:
                best, least = np.zeros(features.shape[1]), rest
                best[chosen] = weights
    return best
