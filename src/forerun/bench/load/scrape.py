"""A server's `/metrics`: Prometheus' text format, and what drafting did between two looks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?")
LABEL = re.compile(r'([a-zA-Z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
ESCAPE = re.compile(r"\\(.)")

PREFIX = "vllm:spec_decode_num_"
DRAFTS = f"{PREFIX}drafts_total"
DRAFT_TOKENS = f"{PREFIX}draft_tokens_total"
ACCEPTED_TOKENS = f"{PREFIX}accepted_tokens_total"
ACCEPTED_PER_POSITION = f"{PREFIX}accepted_tokens_per_pos_total"


class Sample(NamedTuple):
    """One value of a metric."""

    name: str
    labels: dict[str, str]
    value: float


def parse_metrics(text: str) -> list[Sample]:
    """The samples of Prometheus' text exposition format, version 0.0.4; comments and other lines are passed over."""
    samples = []
    for line in text.splitlines():
        found = SAMPLE.fullmatch(line.strip())
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        labels = {name: _unescape(quoted) for name, quoted in LABEL.findall(found["labels"] or "")}
        samples.append(Sample(found["name"], labels, value))
    return samples


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """A server's counts of drafts, summed over its engines."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: dict[int, int] = field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens; None without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted tokens / drafts; None without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the drafts whose token at each position was accepted."""
        return [count / self.num_drafts for _, count in sorted(self.accepted_per_position.items())]

    def since(self, earlier: DraftCounts) -> DraftCounts | None:
        """What was counted after `earlier`; None if there was no draft, or counting began anew in between."""
        counts = DraftCounts(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            {
                position: count - earlier.accepted_per_position.get(position, 0)
                for position, count in self.accepted_per_position.items()
            },
        )
        fell = min(counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) < 0
        return None if fell or not counts.num_draft_tokens else counts

    def to_json(self) -> dict[str, Any]:
        """vLLM's keys; the rate in percent, as there."""
        return {
            "spec_decode_acceptance_rate": None if self.acceptance_rate is None else 100 * self.acceptance_rate,
            "spec_decode_acceptance_length": self.acceptance_length,
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_draft_tokens": self.num_draft_tokens,
            "spec_decode_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_per_position_acceptance_rates": self.acceptance_per_position,
        }


def count_drafts(text: str) -> DraftCounts | None:
    """The counts in a server's metrics, under vLLM's names; None if it has none."""
    sums: dict[str, int] = {}
    per_position: dict[int, int] = {}
    for name, labels, value in parse_metrics(text):
        if name == ACCEPTED_PER_POSITION and labels.get("position", "").isdecimal():
            position = int(labels["position"])
            per_position[position] = per_position.get(position, 0) + int(value)
        elif name in (DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS):
            sums[name] = sums.get(name, 0) + int(value)
    if not sums:
        return None
    return DraftCounts(sums.get(DRAFTS, 0), sums.get(DRAFT_TOKENS, 0), sums.get(ACCEPTED_TOKENS, 0), per_position)


def _unescape(quoted: str) -> str:
    return ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], quoted)
