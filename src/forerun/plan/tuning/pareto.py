"""The Pareto front: what nothing else beats in every respect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def pareto_front(points: Sequence[T], costs: Callable[[T], Sequence[float]]) -> list[T]:
    """Those points that no other dominates, by rising first cost.

    A point dominates another if none of its costs is above the other's, and one is below. Of points with equal
    costs all are kept.

    Args:
        points: of any kind.
        costs: of a point, as many for each; less is better, so a gain goes in with a minus.
    """
    priced = [(tuple(costs(point)), point) for point in points]
    front = [(cost, point) for cost, point in priced if not any(_dominates(other, cost) for other, _ in priced)]
    return [point for _, point in sorted(front, key=lambda pair: pair[0])]


def _dominates(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    return first != second and all(a <= b for a, b in zip(first, second, strict=True))
