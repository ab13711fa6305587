"""Measures how fast this machine writes, trains and answers, before a run is promised to take so long."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.core.sampling_params import SamplingParams
from forerun.llm import LLM
from forerun.train.eagle3_trainer import Eagle3Trainer
from forerun.train.measuring import NUM_TIMED, NUM_TOKENS, TEMPERATURES
from forerun.train.selection import LearnedText

PROBE_STEPS = 4
PROBE_TOKENS = 16  # of an answer
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


def training_rate(trainer: Eagle3Trainer, *, num_steps: int = PROBE_STEPS) -> tuple[float, int]:
    """Return the tokens that are trained in a second, from some steps of a head that is thrown away, and its weights."""
    trainer.run_step().total.item()  # memory is taken, and a GPU, which computes a step after it was called, has done so
    begin, before = time.monotonic(), trainer.num_tokens
    for _ in range(num_steps):
        report = trainer.run_step()
    report.total.item()
    rate = (trainer.num_tokens - before) / (time.monotonic() - begin)
    return rate, sum(tensor.numel() for tensor in trainer.tensors().values() if tensor.is_floating_point())


def quick_texts(*, vocab_size: int, length: int) -> list[LearnedText]:
    """Make up texts that are trained on in less time than any that are written: of one length, with few places to learn."""
    token_ids = np.arange(length) % vocab_size
    places = np.arange(length - length // 4, length - 1)
    return [LearnedText(number=number, token_ids=token_ids, places=places) for number in range(16)]


def measuring_seconds(llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the seconds that measuring a head takes, and those of comparing times with and without one.

    Answers begin as they do without drafts: those take fewer steps, each of which takes longer.
    """
    acceptance = _answering_seconds(llm, prompts, num_tokens=len(TEMPERATURES) * NUM_TOKENS)
    return acceptance, _answering_seconds(llm, prompts[:1], num_tokens=2 * NUM_TIMED * NUM_TOKENS)


def _answering_seconds(llm: LLM, prompts: Sequence[Sequence[int]], *, num_tokens: int) -> float:
    """Return the seconds in which prompts are read and each is answered with so many tokens, from the first few of them."""
    times = [time.monotonic()]
    for count in (1, 1 + PROBE_TOKENS):  # what was read for the first is kept for the second
        params = SamplingParams(temperature=0.0, max_tokens=count)
        llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
        times.append(time.monotonic())
    return times[1] - times[0] + num_tokens / PROBE_TOKENS * (times[2] - times[1])


def peak_memory() -> int | None:
    """Return the bytes that this process had in memory at its largest; None where the system does not say."""
    if sys.platform == "win32":
        return None
    import resource  # POSIX only

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
