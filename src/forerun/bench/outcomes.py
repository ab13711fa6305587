"""From answers to an outcome: medians over rounds, sums over all, and what the texts say."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from forerun.bench.answers import Answers
from forerun.bench.comparison import Outcome
from forerun.core.stats import SpeculationStats, StepTimes
from forerun.llm import LLM
from forerun.verify.registry import MatchingConfig

Judge = Callable[[LLM, Sequence[int], int, int], bool]
"""(plain engine, text before, plain token, other token) -> whether rounding alone explains the other token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """One engine's answers to one kind of prompts: by round, then by batch."""

    kind: str
    name: str
    llm: LLM
    answers: list[list[Answers]] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Tokens per second in each round, the time of reading the prompts included."""
        return [sum(b.num_tokens for b in batches) / sum(b.seconds for b in batches) for batches in self.answers]

    @property
    def decode_speeds(self) -> list[float]:
        """Tokens per second after the first ones, in each round in which a text went beyond them."""
        return [
            sum(b.num_decode_tokens for b in batches) / sum(b.decode_seconds for b in batches)
            for batches in self.answers
            if any(b.num_decode_tokens for b in batches)
        ]

    def texts(self) -> Iterator[list[list[int]]]:
        """The texts of each round, by prompt."""
        return ([*chain.from_iterable(batch.texts for batch in batches)] for batches in self.answers)


def summarise(
    rounds: Rounds, plain: Rounds, prompts: Sequence[Sequence[int]], *, is_greedy: bool, judge: Judge | None
) -> Outcome:
    """What the rounds of a configuration came to beside plain decoding's; `judge` is asked of greedy texts only."""
    speculative = rounds.llm.speculative
    must_be_identical = speculative.is_lossless and (is_greedy or isinstance(speculative.verifier, MatchingConfig))
    batches = [batch for one in rounds.answers for batch in one]
    speculation, times = SpeculationStats(), StepTimes()
    for batch in batches:
        speculation.add(batch.speculation)
        times.add(batch.times)
    differing = _differing(rounds, plain)
    judge = judge if must_be_identical and is_greedy else None
    near_ties = [
        place
        for place, (expected, got) in differing.items()
        if judge is not None and _is_near_tie(plain.llm, prompts[place], expected, got, judge)
    ]
    speeds, decode_speeds = rounds.speeds, rounds.decode_speeds
    speed_ups = _ratios(speeds, plain.speeds)
    return Outcome(
        kind=rounds.kind,
        name=rounds.name,
        speculative=speculative.describe(),
        num_prompts=len(prompts),
        tokens_per_second=statistics.median(speeds),
        speed_up=statistics.median(speed_ups),
        decode_tokens_per_second=_median(decode_speeds),
        decode_speed_up=_median(_ratios(decode_speeds, plain.decode_speeds)),
        all_tokens_per_second=speeds,
        all_speed_ups=speed_ups,
        milliseconds_per_step=times.milliseconds_per_step,
        speculation=speculation,
        num_failed_drafts=sum(batch.num_failed_drafts for batch in batches),
        num_differing=len(differing),
        num_near_ties=len(near_ties),
        is_lossless=speculative.is_lossless,
        must_be_identical=must_be_identical,
    )


def _ratios(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    """Ratios round by round; none where one of the two lacks a round."""
    return [speed / other for speed, other in zip(speeds, others, strict=True)] if len(speeds) == len(others) else []


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _differing(rounds: Rounds, plain: Rounds) -> dict[int, tuple[list[int], list[int]]]:
    """Prompt -> plain text and the other one, of the first round in which they differ."""
    differing: dict[int, tuple[list[int], list[int]]] = {}
    for expected_texts, texts in zip(plain.texts(), rounds.texts(), strict=True):
        for place, (expected, got) in enumerate(zip(expected_texts, texts, strict=True)):
            if expected != got:
                differing.setdefault(place, (expected, got))
    return differing


def _is_near_tie(llm: LLM, prompt: Sequence[int], expected: list[int], got: list[int], judge: Judge) -> bool:
    """Whether rounding explains that two texts part; it never explains that one just ends."""
    place = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    return place is not None and judge(llm, [*prompt, *expected[:place]], expected[place], got[place])
