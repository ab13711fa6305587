"""The findings of a proof, one per check."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """The result of one check.

    BIT_IDENTICAL: text and logprobs are equal to the last bit. EQUAL: the text is. TIE: the texts part
    where rounding can reverse the order of the target's two best tokens. FITS: the samples agree with the
    target's distribution. BUG: the difference exceeds ties and chance; on the native kernels, any
    difference. UNTESTED: drafts stood or fell at too few of the tokens that are compared, or the samples are too
    few to tell one text from another.
    """

    BIT_IDENTICAL = "bit-identical"
    EQUAL = "equal"
    TIE = "numerical tie"
    FITS = "fits"
    BUG = "bug"
    UNTESTED = "untested"


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyFinding:
    """The comparison of one prompt's outputs without and with speculation at temperature 0.

    `position` is the first output token that differs, or whose logprobs do if that is a bug. `gap` is the
    difference in nats of the target's two largest logits where texts part. Both are None for equal outputs.
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
        """Whether no check found a bug and drafts were tested by both the greedy and the sampled checks."""
        findings: list[GreedyFinding | SampledFinding] = [*self.greedy, *self.sampled]
        return not self.untested and all(finding.verdict is not Verdict.BUG for finding in findings)

    @property
    def untested(self) -> list[str]:
        """The kinds of check that tested no draft."""
        is_tested = {
            "greedy": any(finding.num_draft_tokens for finding in self.greedy),
            "sampled": any(finding.verdict is not Verdict.UNTESTED for finding in self.sampled),
        }
        return [kind for kind, tested in is_tested.items() if not tested]

    @property
    def is_bit_identical(self) -> bool:
        """Whether all greedy texts and their logprobs are equal to the last bit."""
        return all(finding.verdict is Verdict.BIT_IDENTICAL for finding in self.greedy)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON, which has no number for what is infinite: "inf"."""
        report = {**asdict(self), "passed": self.passed, "bit_identical": self.is_bit_identical}
        for finding in report["sampled"]:
            if math.isinf(finding["statistic"]):
                finding["statistic"] = "inf"
        return report
