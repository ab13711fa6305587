"""Checks of what a file has: what is of the right type passes, and what is not is named."""

from __future__ import annotations

import pytest

from forerun.core.finite_numbers import is_number
from forerun.errors import ConfigError
from forerun.plan.record_types import check_count, check_keys, check_number, check_type


@pytest.mark.parametrize("value", [True, None, "1", [1], {}, float("nan"), float("inf"), 10**400])
def test_these_are_no_numbers(value: object) -> None:
    assert not is_number(value)
    with pytest.raises(ConfigError, match=r"a file: got x=.*; must be a finite number: mend it"):
        check_number("a file", "x", value, do="mend it")


def test_null_is_right_only_where_it_may_be() -> None:
    check_type("a file", "x", None, str, or_none=True, do="mend it")
    check_count("a file", "x", None, least=1, or_none=True, do="mend it")
    check_number("a file", "x", None, or_none=True, do="mend it")
    with pytest.raises(ConfigError, match="got x=None; must be a text: mend it"):
        check_type("a file", "x", None, str, do="mend it")
    with pytest.raises(ConfigError, match="got x=None; must be a whole number, at least 1: mend it"):
        check_count("a file", "x", None, least=1, do="mend it")


def test_a_number_below_its_bound_is_refused_in_the_same_words() -> None:
    check_number("a file", "x", 0.0, least=0.0, do="mend it")
    check_number("a file", "x", None, least=0.0, or_none=True, do="mend it")
    with pytest.raises(ConfigError, match=r"a file: got x=-0\.5; must be a finite number, at least 0: mend it"):
        check_number("a file", "x", -0.5, least=0.0, do="mend it")
    with pytest.raises(ConfigError, match="got x='1'; must be a finite number, at least 0, or null: mend it"):
        check_number("a file", "x", "1", least=0.0, or_none=True, do="mend it")


def test_a_count_beyond_its_bound_is_refused_with_the_bound() -> None:
    check_count("a file", "x", 2**53, least=1, do="mend it")
    with pytest.raises(ConfigError, match=r"got x=9007199254740993; .*, at least 1, at most 9007199254740992: mend it"):
        check_count("a file", "x", 2**53 + 1, least=1, do="mend it")
    with pytest.raises(ConfigError, match=r"got x=9; .*, at least 1, at most 8, or null: mend it"):
        check_count("a file", "x", 9, least=1, most=8, or_none=True, do="mend it")


def test_a_missing_key_is_named() -> None:
    check_keys("a file", {"x": None, "y": 1}, ("x",), do="mend it")
    with pytest.raises(ConfigError, match="a file: lacks x, z; mend it"):
        check_keys("a file", {"y": 1}, ("x", "y", "z"), do="mend it")
