"""Service levels and their text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.plan.sla import Sla, parse_sla

limits = st.none() | st.floats(1e-6, 1e4)
slas = st.builds(
    Sla, ttft=st.floats(1e-6, 1e4), tpot=limits, icl=limits, e2el=limits, attainment=st.floats(0.01, 0.999)
)


@given(slas)
def test_an_sla_is_read_from_its_json(sla: Sla) -> None:
    again = Sla.from_json(sla.to_json())
    assert again.attainment == sla.attainment
    for name in ("ttft", "tpot", "icl", "e2el"):
        assert getattr(again, name) == pytest.approx(getattr(sla, name))


def test_units_are_read() -> None:
    assert parse_sla("ttft=500ms,itl=50ms") == Sla(ttft=0.5, tpot=0.05)
    sla = parse_sla("ttft = 1.5 s, tpot=20us, e2el=3s, icl=1ms, attainment=0.9")
    assert (sla.ttft, sla.icl, sla.e2el, sla.attainment) == (1.5, 1e-3, 3.0, 0.9)
    assert sla.tpot == pytest.approx(20e-6)


def test_a_request_attains_the_sla_only_within_all_limits() -> None:
    sla = Sla(ttft=1.0, tpot=0.1)
    assert sla.is_met(ttft=1.0, tpot=0.1, icl=9.0, e2el=9.0)
    assert not sla.is_met(ttft=1.1, tpot=0.1, icl=0.0, e2el=0.0)
    assert not sla.is_met(ttft=1.0, tpot=0.11, icl=0.0, e2el=0.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be name=value"),
        ("ttft=0ms", "must be above 0"),
        ("ttft=-5ms", "must be above 0"),
        ("ttft=500", "with its unit"),
        ("ttft=xms", "finite number"),
        ("ttft=1e999s", "finite number"),
        ("tfft=500ms", "did you mean 'ttft'"),
        ("attainment=0.9", "no limit is given"),
        ("ttft=1s,attainment=1", "below 1"),
        ("ttft=1s,itl=1ms,tpot=1ms", "give one"),
    ],
)
def test_an_sla_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_sla(text)
