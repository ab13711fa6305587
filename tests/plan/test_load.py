"""Loads and their text."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.plan.load import Load, parse_given_load, parse_load

positive = st.floats(1.0, 1e6)
loads = st.builds(
    Load,
    rate=st.floats(1e-3, 1e6),
    isl=positive,
    osl=positive,
    cv=st.floats(0.0, 10.0),
    isl_cv=st.floats(0.0, 3.0),
    osl_cv=st.floats(0.0, 3.0),
    prefix_hit_rate=st.floats(0.0, 0.99),
)


@given(loads)
def test_a_load_is_read_from_its_json_and_from_its_text(load: Load) -> None:
    record = load.to_json()
    assert Load.from_json(record) == load
    assert parse_load(",".join(f"{name}={value!r}" for name, value in record.items())) == load


def test_a_load_says_what_must_be_computed_and_written() -> None:
    load = parse_load("rate=20, isl=3000, osl=300, prefix_hit_rate=0.5")
    assert (load.rate, load.isl, load.osl, load.cv) == (20.0, 3000.0, 300.0, 1.0)
    assert load.computed_isl == 1500.0
    assert load.tokens_per_second == 6000.0


def test_burstiness_is_one_over_the_square_of_the_variation() -> None:
    assert parse_load("rate=1,isl=1,osl=1,burstiness=0.25").cv == 2.0
    assert Load(rate=1, isl=1, osl=1, cv=2.0).burstiness == 0.25
    assert Load(rate=1, isl=1, osl=1, cv=0.0).burstiness == math.inf


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be name=value"),
        ("rate=20,isl=3000", "osl missing"),
        ("rate=20,isl=3000,osl=300,", "must be name=value"),
        ("rate=20,isl=3000,ols=300", "did you mean 'osl'"),
        ("rate=0,isl=3000,osl=300", "rate=0; must be a number above 0"),
        ("rate=nan,isl=3000,osl=300", "must be a finite number"),
        ("rate=many,isl=3000,osl=300", "must be a finite number"),
        ("rate=1,rate=2,isl=3000,osl=300", "given twice"),
        ("rate=1,isl=0.5,osl=300", "at least 1 token"),
        ("rate=1,isl=5,osl=300,cv=-1", "cv=-1; must be a number from 0"),
        ("rate=1,isl=5,osl=300,osl_cv=1e160", "osl_cv=1e\\+160; must be a number from 0"),
        ("rate=1,isl=5,osl=300,burstiness=1e-300", "cv=1e\\+150; must be a number from 0"),
        ("rate=1,isl=5,osl=300,prefix_hit_rate=1", "below 1"),
        ("rate=1,isl=5,osl=300,cv=1,burstiness=1", "give one"),
        ("rate=1,isl=5,osl=300,burstiness=0", "above 0"),
    ],
)
def test_a_load_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_load(text)


def test_a_hit_rate_of_nothing_that_is_named_differs_from_one_that_is_not() -> None:
    assert parse_given_load("rate=1,isl=5,osl=3,prefix_hit_rate=0").named_hit_rate == 0.0
    assert parse_given_load("rate=1,isl=5,osl=3").named_hit_rate is None
