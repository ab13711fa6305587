"""Computes speeds and ratios from the pieces of a run: medians over rounds, sums over groups."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.auto_speculation.pieces import Measurement, Piece
from forerun.bench.outcomes import PLAIN


def whole(measurements: Sequence[Measurement]) -> float:
    """Tokens per second, prompts included."""
    return sum(one.num_tokens for one in measurements) / sum(one.seconds for one in measurements)


def decoding(measurements: Sequence[Measurement]) -> float:
    """Tokens per second of the steps that computed no token of a prompt."""
    return sum(one.num_decode_tokens for one in measurements) / sum(one.decode_seconds for one in measurements)


Speed = Callable[[Sequence[Measurement]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstGroup:
    """The group where a configuration gains least over plain decoding (median over rounds)."""

    group: int
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Means over steps of one sequence each: tokens gained, rows computed, and shares of each drafter in these rows."""

    tokens: float
    rows: float
    drafted_rows: dict[str, float]


class Summary:
    """What the pieces say about one workload.

    Configurations are only compared within a piece, where they took turns; two that never met have no ratio.
    """

    def __init__(self, pieces: Sequence[Piece], *, workload: str, judged: str) -> None:
        self.judged = judged
        self.pieces = [piece for piece in pieces if piece.workload == workload]

    @property
    def configs(self) -> list[str]:
        """Plain decoding, the judged configuration, the others."""
        return [*dict.fromkeys(name for piece in self.pieces for name in piece.configs)]

    @property
    def static_configs(self) -> list[str]:
        """All that are neither plain decoding nor judged."""
        return [name for name in self.configs if name not in (PLAIN, self.judged)]

    @property
    def num_rounds(self) -> int:
        """The number of rounds of which there is a piece."""
        return len({piece.round for piece in self.pieces})

    def speed(self, config: str, speed: Speed = whole) -> float:
        """Tokens per second, the median over rounds."""
        return statistics.median(
            speed([one for piece in pieces for one in _of(piece, config)]) for pieces in self._rounds(config)
        )

    def ratio(self, config: str, other: str, speed: Speed = whole) -> float:
        """A configuration's speed / another's in the same pieces, the median over rounds."""
        return statistics.median(
            speed([one for piece in pieces for one in _of(piece, config)])
            / speed([one for piece in pieces for one in _of(piece, other)])
            for pieces in self._rounds(config, other)
        )

    def best_static(self, speed: Speed = whole) -> str | None:
        """The static configuration that the judged one gains least over; None if there is none."""
        return min(self.static_configs, key=lambda name: self.ratio(self.judged, name, speed), default=None)

    def worst_group(self, config: str) -> WorstGroup:
        """Where the configuration gains least over plain decoding."""
        ratios: dict[int, list[float]] = {}
        for pieces in self._rounds(config, PLAIN):
            mine = [one for piece in pieces for one in _of(piece, config)]
            plain = [one for piece in pieces for one in _of(piece, PLAIN)]
            for group in {one.group for one in mine}:
                parts = ([one for one in some if one.group == group] for some in (mine, plain))
                ratios.setdefault(group, []).append(_quotient(*map(whole, parts)))
        group = min(ratios, key=lambda group: statistics.median(ratios[group]))
        return WorstGroup(group=group, ratio=statistics.median(ratios[group]))

    def steps(self, config: str) -> StepCounts:
        """Counts over all rounds."""
        measured = [one for piece in self.pieces for one in _of(piece, config)]
        num_steps = sum(one.num_steps for one in measured)
        drafted: dict[str, int] = {}
        for one in measured:
            for name, (num_drafted, _) in one.drafted_by.items():
                drafted[name] = drafted.get(name, 0) + num_drafted
        return StepCounts(
            tokens=1 + sum(one.num_accepted_tokens for one in measured) / num_steps,
            rows=1 + sum(one.num_draft_tokens for one in measured) / num_steps,
            drafted_rows={name: count / num_steps for name, count in drafted.items()},
        )

    def num_differing(self, config: str) -> int:
        """Texts, in any round, that are not plain decoding's."""
        return sum(one.num_differing for piece in self.pieces for one in _of(piece, config))

    def num_failed_drafts(self, config: str) -> int:
        """Times that a drafter failed."""
        return sum(one.num_failed_drafts for piece in self.pieces for one in _of(piece, config))

    def _rounds(self, *configs: str) -> Iterator[list[Piece]]:
        """For each round its pieces in which all of `configs` took part, if there are any."""
        for number in sorted({piece.round for piece in self.pieces}):
            found = [piece for piece in self.pieces if piece.round == number and set(configs) <= set(piece.configs)]
            if found:
                yield found


def _of(piece: Piece, config: str) -> list[Measurement]:
    return [one for one in piece.measurements if one.config == config]


def _quotient(first: float, second: float) -> float:
    return first / second
