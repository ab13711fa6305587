"""Computes medians and ratios of a run's measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Measurement = dict[str, Any]
Value = Callable[[Measurement], float]


def decode_speed(measurement: Measurement) -> float:
    """Tokens per second after the first token of each sequence."""
    num_tokens = measurement["num_tokens"] - measurement["num_sequences"]
    return float(num_tokens / (measurement["seconds"] - measurement["first_token_seconds"]))


def whole_speed(measurement: Measurement) -> float:
    """Tokens per second, prefill included."""
    return float(measurement["num_tokens"] / measurement["seconds"])


def milliseconds(measurement: Measurement) -> float:
    """Milliseconds of the whole answer."""
    return float(1e3 * measurement["seconds"])


def pass_milliseconds(rows: int) -> Value:
    """T(rows), the median time of a forward pass over so many rows."""
    return lambda measurement: 1e3 * statistics.median(measurement["seconds"][str(rows)])


def pass_ratio(rows: int) -> Value:
    """T(rows) / T(1) of the same curve."""
    return lambda measurement: pass_milliseconds(rows)(measurement) / pass_milliseconds(1)(measurement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The number of prompts, and of those whose speculated text differs from the plain one."""

    differing: int
    prompts: int


class Summary:
    """A run's measurements, by contender and kind of cell."""

    def __init__(self, measurements: list[Measurement]) -> None:
        self._by_place: dict[tuple[str, str], dict[tuple[int, int], Measurement]] = {}
        for one in measurements:
            place = self._by_place.setdefault((one["contender"], one["kind"]), {})
            place[one["round"], one["index"]] = one

    def median(self, contender: str, kind: str, value: Value) -> float | None:
        """The median over all rounds and prompts, or None if nothing was measured."""
        values = [value(one) for one in self._cells(contender, kind).values()]
        return statistics.median(values) if values else None

    def ratio(self, contender: str, other: str, kind: str, value: Value) -> float | None:
        """The median of the contender's value / the other's value for the same prompt in the same round."""
        ratios = [value(mine) / value(its) for mine, its in self._pairs(contender, other, kind)]
        return statistics.median(ratios) if ratios else None

    def acceptance_length(self, contender: str, kind: str) -> float | None:
        """Tokens per forward pass, bonus token and prefill included, or None if the peer does not report it."""
        counted = [one for one in self._cells(contender, kind).values() if one["accepted"] is not None]
        num_tokens = sum(one["num_tokens"] for one in counted)
        return num_tokens / (num_tokens - sum(one["accepted"] for one in counted)) if counted else None

    def texts(self, contender: str, plain: str, kind: str) -> Texts:
        """Count the prompts whose text differs from plain decoding's in any round."""
        differing = {mine["index"] for mine, its in self._pairs(contender, plain, kind) if mine["text"] != its["text"]}
        return Texts(
            differing=len(differing), prompts=len({mine["index"] for mine, _ in self._pairs(contender, plain, kind)})
        )

    def _cells(self, contender: str, kind: str) -> dict[tuple[int, int], Measurement]:
        return self._by_place.get((contender, kind), {})

    def _pairs(self, contender: str, other: str, kind: str) -> Iterator[tuple[Measurement, Measurement]]:
        its = self._cells(other, kind)
        return ((mine, its[place]) for place, mine in self._cells(contender, kind).items() if place in its)
