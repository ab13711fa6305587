"""What a proof found, check by check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """bit-identical: text and logprobs are the same to the last bit. equal: the text is.

    tie: they part where the target's two best tokens are as good as equal. fits / bug: the statistics
    agree with the target, or the output differs beyond any tie or chance; where the native kernels
    compute, any difference is a bug. untested: nothing was drafted, so nothing was put to the test.
    """

    BIT_IDENTICAL = "bit-identical"
    EQUAL = "equal"
    TIE = "numerical tie"
    FITS = "fits"
    BUG = "bug"
    UNTESTED = "untested"


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyFinding:
    """One prompt, decoded plainly and with speculation at temperature 0.

    `position` is the first output token that differs, or whose logprobs do where that is a bug;
    `gap` the difference of the target's two largest logits where texts part (nats). Both None when
    the outputs are equal.
    """

    prompt: str
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    verdict: Verdict
    position: int | None = None
    gap: float | None = None
    plain_token: str | None = None
    speculated_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledFinding:
    """A chi-square test of sampled outputs against the target's exact distribution."""

    drafter: str
    num_samples: int
    num_draft_tokens: int
    num_accepted_tokens: int
    statistic: float
    degrees_of_freedom: int
    threshold: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofReport:
    """All findings for one model and configuration."""

    model: str
    configuration: str
    dtype: str
    is_lossless_by_design: bool
    greedy: list[GreedyFinding]
    sampled: list[SampledFinding]

    @property
    def passed(self) -> bool:
        """Whether no check found a bug and at least one check of each kind tested drafts."""
        findings: list[GreedyFinding | SampledFinding] = [*self.greedy, *self.sampled]
        tested = all(any(f.num_draft_tokens for f in kind) for kind in (self.greedy, self.sampled))
        return tested and all(finding.verdict is not Verdict.BUG for finding in findings)

    @property
    def is_bit_identical(self) -> bool:
        """Whether drafting changed not one bit of any greedy text and its logprobs."""
        return all(finding.verdict is Verdict.BIT_IDENTICAL for finding in self.greedy)

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {**asdict(self), "passed": self.passed, "bit_identical": self.is_bit_identical}
