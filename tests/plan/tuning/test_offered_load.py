"""Loads: what is read, and what is refused."""

from __future__ import annotations

import math

import pytest

from forerun.errors import ConfigError
from forerun.plan.tuning.offered_load import OfferedLoad, parse_offered_load


@pytest.mark.parametrize(
    ("text", "load"),
    [
        ("rate=2", OfferedLoad(rate=2.0)),
        ("rate=0.5,burstiness=0.25", OfferedLoad(rate=0.5, burstiness=0.25)),
        ("rate=2,cv=2", OfferedLoad(rate=2.0, burstiness=0.25)),
        ("rate=2,cv=0", OfferedLoad(rate=2.0, burstiness=math.inf)),
        ("rate=2,cv=1e-200", OfferedLoad(rate=2.0, burstiness=math.inf)),
        ("concurrency=4", OfferedLoad(concurrency=4)),
    ],
)
def test_a_load_is_a_rate_or_clients(text, load):
    assert parse_offered_load(text) == load


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cv=1", "got none of rate and concurrency"),
        ("rate=2,concurrency=4", "got both of rate and concurrency"),
        ("rate=0", "rate=0; must be a number above 0"),
        ("rate=-1", "rate=-1; must be"),
        ("concurrency=0", "concurrency=0; must be 1 or more"),
        ("concurrency=1.5", "concurrency=1.5; must be a whole number"),
        ("concurrency=2,cv=1", "say how a rate comes"),
        ("rate=2,cv=1,burstiness=1", "got both cv and burstiness"),
        ("rate=2,burstiness=0", "burstiness=0; must be above 0"),
        ("rate=2,cv=1e200", "burstiness=0; must be above 0"),
        ("rate=2,cv=1e100", "which is cv, at most 1e"),
        ("rate=20,isl=3000,osl=300", "got isl=3000; the prompts have their own lengths"),
        ("speed=2", "unknown key 'speed'"),
    ],
)
def test_other_loads_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_offered_load(text)


def test_an_infinite_burstiness_is_json():
    assert OfferedLoad(rate=1.0, burstiness=math.inf).to_json()["burstiness"] == "inf"


def test_as_many_run_as_there_are_clients_and_places():
    assert OfferedLoad(concurrency=4).most_running(64) == 4
    assert OfferedLoad(concurrency=80).most_running(64) == 64
    assert OfferedLoad(rate=1.0).most_running(64) == 64
