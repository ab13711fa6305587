"""The Pareto front against its definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forerun.plan.tuning.pareto import pareto_front

POINTS = st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=12)


def is_better(a, b):
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b, strict=True))


@given(points=POINTS)
def test_the_front_is_what_nothing_beats(points):
    front = pareto_front(points, lambda point: point)
    assert sorted(front) == sorted(p for p in points if not any(is_better(q, p) for q in points))


@given(points=POINTS)
def test_whatever_is_not_on_the_front_is_beaten_by_something_on_it(points):
    front = pareto_front(points, lambda point: point)
    assert all(point in front or any(is_better(other, point) for other in front) for point in points)


def test_the_front_rises_with_its_first_cost():
    assert pareto_front([(3, 0), (1, 5), (2, 9)], lambda point: point) == [(1, 5), (3, 0)]
