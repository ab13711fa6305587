"""Speculative configurations beside plain decoding: what was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from forerun.core.stats import SpeculationStats

PLAIN = "plain"
"""The name of decoding without drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One configuration on one kind of prompts.

    Speeds are medians over rounds, speed-ups medians of each round's own ratio to plain decoding. Those
    of decoding leave out the time up to each prompt's first token, as do `speculation` and
    `milliseconds_per_step`; None where no text went beyond it. A text *differs* if it does so in any
    round, token by token.
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
    num_near_ties: int  # of these, explained by rounding
    is_lossless: bool
    must_be_identical: bool  # lossless, and sampled with plain decoding's noise if sampled at all

    @property
    def texts(self) -> str:
        """What became of the texts, in a few words."""
        if not self.num_differing:
            return "identical"
        differ = f"{self.num_differing} of {self.num_prompts} differ"
        if self.must_be_identical:
            return f"{differ}, {self.num_near_ties} by near-ties" if self.num_near_ties else differ
        return f"{differ} ({'sampled anew' if self.is_lossless else 'lossy'})"

    def to_json(self) -> dict[str, Any]:
        """All but `speculation`, for machines."""
        figures = {**asdict(self), "identical": not self.num_differing}
        del figures["speculation"]
        return figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Every outcome, plain decoding's first for each kind of prompts, and what it was measured with."""

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

    @property
    def by_kind(self) -> dict[str, list[Outcome]]:
        """Kind of prompts -> its outcomes."""
        kinds: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            kinds.setdefault(outcome.kind, []).append(outcome)
        return kinds

    def to_json(self) -> dict[str, Any]:
        """All but the outcomes' `speculation`, for machines."""
        return {**asdict(self), "outcomes": [outcome.to_json() for outcome in self.outcomes]}
