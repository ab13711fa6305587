"""What a training run will take and give, said before it begins."""

from __future__ import annotations

import math
from dataclasses import dataclass

from forerun.errors import ConfigError

CURVE = ((3e5, 1.1), (1e6, 1.25), (1e7, 1.8), (5e7, 2.1))
"""Tokens that a head was trained on -> acceptance length of greedy chat with drafts of three tokens; between them the
logarithm counts. These are guesses from published heads of larger models: no head of this command is measured yet."""

BYTES_PER_TOKEN = 5  # of a text in its file, spans and headers included
STATE_BYTES = 3 * 4 * 11_000_000  # of a head in training: masters and two moments
HEAD_BYTES = 4 * 22_000_000  # of the heads that are kept

LEAST_SECONDS_OF_TRAINING = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured of writing and training on this machine.

    Attributes:
        writing: tokens of answers written in a second.
        training: tokens trained in a second, prompts included.
        per_text: tokens of answers in a conversation.
        overhead: tokens of texts / tokens of answers.
    """

    writing: float
    training: float
    per_text: float
    overhead: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run will take, from rates that were just measured.

    Attributes:
        num_written: tokens of answers that will be written.
        num_trained: tokens that will be trained on, each time they are.
        write_seconds: time of writing.
        train_seconds: time of training.
        disk_bytes: of the output folder.
        length: acceptance length to be expected, greedy.
    """

    num_written: float
    num_trained: float
    write_seconds: float
    train_seconds: float
    disk_bytes: float
    length: float

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
    ) -> Estimate:
        """Estimate a run.

        Args:
            rates: what was measured.
            budget: seconds that it may take, or None.
            count: conversations, or None for as many as there is time for.
            epochs: times that each text is trained on, or None for as many as there is time for.
            shares: of the budget, that writing may take and that training may take.
            most_epochs: at most so many are trained.

        Raises:
            ConfigError: the budget is too small to train anything.
        """
        most_written = math.inf if count is None else count * rates.per_text
        by_time = math.inf if budget is None else shares[0] * budget * rates.writing
        num_written = min(most_written, by_time)
        write_seconds = num_written / rates.writing
        if epochs is None:
            assert budget is not None, "a run has epochs or a budget"
            train_seconds = sum(shares) * budget - write_seconds
            epochs = min(most_epochs, train_seconds * rates.training / (num_written * rates.overhead))
        num_trained = epochs * num_written * rates.overhead
        train_seconds = num_trained / rates.training
        if budget is not None and train_seconds < min(LEAST_SECONDS_OF_TRAINING, shares[1] * budget / 2):
            raise ConfigError(
                f"--budget: of {budget:.0f} seconds {train_seconds:.0f} would be left to train; give more time or fewer conversations"
            )
        return cls(
            num_written=num_written,
            num_trained=num_trained,
            write_seconds=write_seconds,
            train_seconds=train_seconds,
            disk_bytes=num_written * rates.overhead * BYTES_PER_TOKEN + STATE_BYTES + HEAD_BYTES,
            length=expected_length(num_trained),
        )


def expected_length(num_trained: float) -> float:
    """Return the acceptance length to be expected of a head that was trained on so many tokens."""
    points = [(1.0, 1.0), *CURVE]
    if num_trained >= points[-1][0]:
        return points[-1][1]
    for (few, short), (many, long) in zip(points, points[1:], strict=False):
        if num_trained < many:
            share = (math.log(max(1.0, num_trained)) - math.log(few)) / (math.log(many) - math.log(few))
            return short + share * (long - short)
    return 1.0
