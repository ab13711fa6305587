"""Measures how fast this machine writes and trains, before a run is promised to take so long."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from forerun.train.head_trainer import HeadTrainer

PROBE_STEPS = 4
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss


@dataclass(slots=True)
class WritingPace:
    """How fast texts are written while all conversations go on at once: the end, when few are left, is not counted.

    Attributes:
        num_generated: tokens that the target generated, questions included.
        num_answers: those of them that are in answers.
    """

    num_generated: int = 0
    num_answers: int = 0
    _begin: tuple[float, int] | None = None
    _end: tuple[float, int] | None = None

    def note(self, seconds: float, num_generated: int) -> None:
        """Note how many tokens had been generated after so many seconds; called while all conversations go on."""
        if self._begin is None and num_generated:
            self._begin = (seconds, num_generated)
        self._end = (seconds, num_generated)

    @property
    def answers_per_second(self) -> float | None:
        """Tokens of answers that are written in a second; None if there were too few to tell."""
        if self._begin is None or self._end is None or self._end[0] <= self._begin[0] or not self.num_answers:
            return None
        generated = (self._end[1] - self._begin[1]) / (self._end[0] - self._begin[0])
        return generated * self.num_answers / self.num_generated


def training_rate(trainer: HeadTrainer) -> tuple[float, int]:
    """Return the tokens that are trained in a second, from some steps of a head that is thrown away, and its weights."""
    trainer.run_step()  # memory is taken
    begin, before = time.monotonic(), trainer.num_tokens
    for _ in range(PROBE_STEPS):
        trainer.run_step()
    rate = (trainer.num_tokens - before) / (time.monotonic() - begin)
    return rate, sum(tensor.numel() for tensor in trainer.tensors().values() if tensor.is_floating_point())


def peak_memory() -> int | None:
    """Return the bytes that this process had in memory at its largest; None where the system does not say."""
    if sys.platform == "win32":
        return None
    import resource  # POSIX only

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
