"""Named measurements, in the shape of vLLM's `LLM.get_metrics`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that only grows."""

    name: str
    value: int
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number that goes up and down."""

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Vector:
    """An array of counters, one per position."""

    name: str
    values: list[int]
    labels: dict[str, str] = field(default_factory=dict)


Metric = Counter | Gauge | Vector
