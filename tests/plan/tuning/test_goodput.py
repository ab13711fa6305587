"""Goals of goodput in the words of vLLM and of guidellm."""

from __future__ import annotations

import pytest

from forerun.errors import ConfigError
from forerun.plan.sla import Sla
from forerun.plan.tuning.goodput import parse_goodput


@pytest.mark.parametrize(
    "words",
    [
        ["ttft:500", "tpot:50"],
        ["ttft_ms=500", "tpot_ms=50"],
        ['{"ttft_ms": 500, "tpot_ms": 50.0, "e2el_ms": null}'],
        ["ttft:500", '{"tpot_ms": 50}'],
    ],
)
def test_goals_are_milliseconds(words):
    assert parse_goodput(words) == Sla(ttft=0.5, tpot=0.05)


def test_the_share_of_requests_may_be_given():
    assert parse_goodput(["e2el:2000", "target_attainment=0.5"]) == Sla(e2el=2.0, attainment=0.5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no limit is given"),
        (["target_attainment=0.5"], "no limit is given"),
        (["500"], "must be NAME:MILLISECONDS"),
        (["ttft:soon"], "got ttft 'soon'; must be a finite number"),
        (["ttft:nan"], "must be a finite number"),
        (['{"ttft_ms": true}'], "must be a finite number"),
        (["ttft:0"], "must be above 0"),
        (["ttft:-5"], "must be above 0"),
        (["ttft:5", "ttft_ms=6"], "got ttft_ms twice"),
        (["itl:5"], "did you mean 'ttft'|known:"),
        (["{ttft_ms: 5}"], "not JSON"),
        (["ttft:5", "attainment=1.5"], "attainment=1.5"),
    ],
)
def test_other_words_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_goodput(words)
