"""The outcome of a comparison: medians over rounds, sums over batches, and which texts differ."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from forerun.core.stats import SpeculationStats, StepTimes
from forerun.engine.regret import SpeculationReport
from forerun.llm import LLM
from forerun.verify.matching import MatchingConfig

PLAIN = "plain"
"""The name of decoding without drafts."""

Judge = Callable[[LLM, Sequence[int], int, int], bool]
"""(plain engine, text before, plain token, other token) -> whether rounding alone explains the other token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The figures of one configuration on one kind of prompts.

    Speeds are medians over rounds; speed-ups are medians of each round's own ratio to plain decoding.
    The `decode_` figures, `speculation` and `milliseconds_per_step` leave out the time up to each
    prompt's first token; the speeds are None if no text had a second token. A text differs if its
    tokens do in any round.
    """

    kind: str
    name: str
    speculative: str
    num_prompts: int
    tokens_per_second: float
    speed_up: float
    decode_tokens_per_second: float | None
    decode_speed_up: float | None
    all_tokens_per_second: list[float]  # by round
    all_speed_ups: list[float]
    milliseconds_per_step: dict[str, float]  # mean, by phase
    speculation: SpeculationStats
    num_failed_drafts: int
    num_differing: int  # prompts whose text is not plain decoding's
    num_near_ties: int | None  # of these, explained by rounding; None: that was not looked for
    is_lossless: bool
    must_be_identical: bool  # lossless, and sampled with plain decoding's noise if sampled at all

    @property
    def texts(self) -> str:
        """Whether the texts are plain decoding's, in a few words."""
        if not self.num_differing:
            return "identical"
        differ = f"{self.num_differing} of {self.num_prompts} differ"
        if self.must_be_identical:
            return f"{differ}, {self.num_near_ties} by near-ties" if self.num_near_ties else differ
        return f"{differ} ({'sampled anew' if self.is_lossless else 'lossy'})"

    def to_json(self) -> dict[str, Any]:
        """All fields but `speculation`, as JSON."""
        figures = {**asdict(self), "identical": not self.num_differing}
        del figures["speculation"]
        return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All outcomes, plain decoding's first for each kind of prompts, and the settings of the measurement.

    `reports` say of each configuration that chooses the lengths of its drafts what that was worth, in all its steps together.
    """

    model: str
    dtype: str
    device: str
    kernels: str
    machine: str
    repeats: int
    max_tokens: int
    batch_size: int
    temperature: float
    gigabytes_per_second: float  # of the memory, median
    all_gigabytes_per_second: list[float]  # by round
    configs: Mapping[str, Mapping[str, Any]]
    outcomes: list[Outcome]
    reports: Mapping[str, SpeculationReport]

    @property
    def by_kind(self) -> dict[str, list[Outcome]]:
        """Kind of prompts -> its outcomes."""
        kinds: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            kinds.setdefault(outcome.kind, []).append(outcome)
        return kinds

    def to_json(self) -> dict[str, Any]:
        """All fields but the outcomes' `speculation`, as JSON."""
        return {**asdict(self), "outcomes": [outcome.to_json() for outcome in self.outcomes]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The texts of one batch, with times and counts.

    Decoding begins when each prompt has its first token. `speculation` and `times` are of decoding
    steps alone, without prefill.
    """

    texts: list[list[int]]  # token ids, one text per prompt
    seconds: float  # from the requests to the last token
    decode_seconds: float  # the part of these after each prompt's first token
    num_decode_tokens: int
    num_failed_drafts: int
    speculation: SpeculationStats
    times: StepTimes

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(map(len, self.texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """One engine's answers to one kind of prompts, by round and batch."""

    kind: str
    name: str
    llm: LLM
    answers: list[list[Answers]] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each round, prefill included."""
        return [sum(b.num_tokens for b in batches) / sum(b.seconds for b in batches) for batches in self.answers]

    @property
    def decode_speeds(self) -> list[float]:
        """Tokens per second after the first token, of each round with a text of two tokens or more."""
        return [
            sum(b.num_decode_tokens for b in batches) / sum(b.decode_seconds for b in batches)
            for batches in self.answers
            if any(b.num_decode_tokens for b in batches)
        ]

    def texts(self) -> Iterator[list[list[int]]]:
        """The texts of each round, one per prompt."""
        return ([*chain.from_iterable(batch.texts for batch in batches)] for batches in self.answers)


def summarise(
    rounds: Rounds, plain: Rounds, prompts: Sequence[Sequence[int]], *, is_greedy: bool, judge: Judge | None
) -> Outcome:
    """Compare the rounds of a configuration with those of plain decoding.

    `judge` is called for greedy texts that must be identical and are not; None: their near-ties are not looked for.
    """
    speculative = rounds.llm.speculative
    must_be_identical = speculative.is_lossless and (is_greedy or isinstance(speculative.verifier, MatchingConfig))
    batches = [batch for one in rounds.answers for batch in one]
    speculation, times = SpeculationStats(), StepTimes()
    for batch in batches:
        speculation.add(batch.speculation)
        times.add(batch.times)
    differing = _differing(rounds, plain)
    to_judge = differing if must_be_identical and is_greedy else {}
    near_ties = [
        all(_part_at_near_tie(plain.llm, prompts[place], *pair, judge) for pair in pairs)
        for place, pairs in to_judge.items()
        if judge is not None
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
        num_near_ties=None if to_judge and judge is None else sum(near_ties),
        is_lossless=speculative.is_lossless,
        must_be_identical=must_be_identical,
    )


def _ratios(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    """Ratios round by round; empty if one of the two lacks a round."""
    return [speed / other for speed, other in zip(speeds, others, strict=True)] if len(speeds) == len(others) else []


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _differing(rounds: Rounds, plain: Rounds) -> dict[int, list[tuple[list[int], list[int]]]]:
    """Prompt -> plain and other text of each round in which they differ, equal pairs once."""
    differing: dict[int, list[tuple[list[int], list[int]]]] = {}
    for expected_texts, texts in zip(plain.texts(), rounds.texts(), strict=True):
        for place, (expected, got) in enumerate(zip(expected_texts, texts, strict=True)):
            if expected != got and (expected, got) not in (pairs := differing.setdefault(place, [])):
                pairs.append((expected, got))
    return differing


def _part_at_near_tie(llm: LLM, prompt: Sequence[int], expected: list[int], got: list[int], judge: Judge) -> bool:
    """Whether two texts part at a near-tie; False if one of them merely ends earlier."""
    place = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    return place is not None and judge(llm, [*prompt, *expected[:place]], expected[place], got[place])
