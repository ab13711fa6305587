"""Which settings are whole numbers, and what is said of those that are not."""

from __future__ import annotations

import pytest

from forerun.core.integers import check_integer, is_integer
from forerun.errors import ConfigError


@pytest.mark.parametrize(("value", "is_one"), [(0, True), (-3, True), (True, False), (2.0, False), ("2", False)])
def test_true_a_float_and_a_text_are_no_integers(value: object, is_one: bool) -> None:
    assert is_integer(value) == is_one


@pytest.mark.parametrize("value", [1, 8])
def test_both_ends_of_a_range_are_in_it(value: int) -> None:
    check_integer("k", value, least=1, most=8)


@pytest.mark.parametrize("value", [0, 9, None, True, 1.5, "2"])
def test_what_is_out_of_range_or_no_integer_is_refused_in_one_line(value: object) -> None:
    with pytest.raises(ConfigError) as error:
        check_integer("k", value, least=1, most=8, do="lower it")
    assert str(error.value) == f"k: got {value!r}; must be an integer from 1 to 8; lower it"


def test_where_there_is_no_most_none_is_named() -> None:
    check_integer("k", 10**30, least=1)
    with pytest.raises(ConfigError, match="k: got 0; must be an integer of 1 or more; leave it out for the default"):
        check_integer("k", 0, least=1)
