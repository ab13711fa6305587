"""What a training run will take and give, said before it begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.errors import ConfigError
from forerun.train.eagle3_trainer import BATCH_TOKENS

CURVE = (
    (3e5, 1.25),
    (1e6, 1.45),
    (1.7e6, 1.65),
    (3.4e6, 1.8),
    (4.9e6, 2.0),
    (8.5e6, 2.15),
    (1.44e7, 2.3),
    (6.56e7, 2.47),
)
"""Tokens that a head was trained on -> acceptance length of greedy chat with drafts of three tokens; between them the
logarithm counts. They are those of the default model's head."""

BYTES_PER_TOKEN = 5  # of a text in its file, spans and headers included
STATE_BYTES = 2 * 3 * 4  # of a weight in training: master and two moments, fp32, beside those that they replace
HEAD_BYTES = 2  # of a weight of a head that is kept
LEAST_STEPS = 80  # fewer train nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured of writing, training and answering on this machine.

    Attributes:
        writing: tokens of answers written in a second.
        training: tokens trained in a second, prompts included.
        measuring: seconds in which a head's acceptance is measured.
        timing: seconds in which times with and without the best head are compared.
        per_text: tokens of answers in a conversation, those that came to nothing included.
        overhead: tokens of texts / tokens of answers.
        num_weights: of the head.
        memory_bytes: of this process at its largest, writing and training included; None if that is not known.
        kept_bytes: of the hidden states of a token, where they are kept on disk.
    """

    writing: float
    training: float
    measuring: float
    timing: float
    per_text: float
    overhead: float
    num_weights: int
    memory_bytes: int | None
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run will take, from rates that were just measured.

    Attributes:
        num_written: tokens of answers that will be written.
        num_trained: tokens that will be trained on, each time they are.
        write_seconds: time of writing.
        train_seconds: time of training.
        measure_seconds: time of measuring the heads that are kept.
        disk_bytes: of the output folder.
        memory_bytes: of the process at its largest; None if that is not known.
        length: acceptance length to be expected, greedy; None of a head that is trained further, which has learnt already.
    """

    num_written: float
    num_trained: float
    write_seconds: float
    train_seconds: float
    measure_seconds: float
    disk_bytes: float
    memory_bytes: int | None
    length: float | None

    @classmethod
    def of(
        cls,
        rates: Rates,
        *,
        budget: float | None,
        count: int | None,
        epochs: float | None,
        shares: tuple[float, float],
        most_epochs: float,
        kept_at: Sequence[float],
        num_written: float | None = None,
    ) -> Estimate:
        """Estimate a run.

        Args:
            rates: what was measured.
            budget: seconds that it may take, or None.
            count: conversations, or None for as many as there is time for.
            epochs: times that each text is trained on, or None for as many as there is time for.
            shares: of the budget, that writing may take and that training may take.
            most_epochs: at most so many are trained.
            kept_at: for each head that is kept, after how many tokens of training; 0 if it is however few there are.
            num_written: tokens of answers, where all are written already.
        """
        if num_written is None:
            most_written = math.inf if count is None else count * rates.per_text
            num_written = min(most_written, math.inf if budget is None else shares[0] * budget * rates.writing)
            write_seconds = num_written / rates.writing
        else:
            write_seconds = 0.0
        left = math.inf if budget is None else sum(shares) * budget - write_seconds
        num_trained = plan_tokens(
            num_written * rates.overhead, seconds=left, rate=rates.training, most_epochs=epochs or most_epochs
        )
        num_heads = sum(num_tokens <= num_trained for num_tokens in kept_at)
        return cls(
            num_written=num_written,
            num_trained=num_trained,
            write_seconds=write_seconds,
            train_seconds=num_trained / rates.training,
            measure_seconds=num_heads * rates.measuring + rates.timing,
            disk_bytes=num_written * rates.overhead * (BYTES_PER_TOKEN + rates.kept_bytes)
            + rates.num_weights * (STATE_BYTES + HEAD_BYTES * (num_heads + 1)),
            memory_bytes=rates.memory_bytes,
            length=expected_length(num_trained),
        )


def plan_tokens(num_tokens: float, *, seconds: float, rate: float, most_epochs: float) -> float:
    """Return on how many tokens a head is trained, of texts of `num_tokens`, in so many seconds at `rate` tokens a second."""
    return min(most_epochs * num_tokens, max(0.0, seconds) * rate)


def count_steps(num_trained: float, batch_tokens: int = BATCH_TOKENS) -> int:
    """Return in how many steps of `batch_tokens` so many tokens are trained.

    Raises:
        ConfigError: they are too few to train anything.
    """
    num_steps = round(num_trained / batch_tokens)
    if num_steps < LEAST_STEPS:
        raise ConfigError(
            f"training: what is asked for comes to {num_trained:.0f} tokens at most, which are {num_steps} steps, and at "
            f"least {LEAST_STEPS} of {batch_tokens} tokens are needed to train anything; give more time, epochs or conversations"
        )
    return num_steps


def expected_length(num_trained: float) -> float:
    """Return the acceptance length to be expected of a head that was trained on so many tokens."""
    counts, lengths = zip((1.0, 1.0), *CURVE, strict=True)
    return float(np.interp(math.log(max(1.0, num_trained)), np.log(counts), lengths))
