"""Figures of made-up pieces."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.auto_speculation.pieces import Measurement, Piece
from benchmarks.auto_speculation.report import problems, show, summaries
from benchmarks.auto_speculation.summary import decoding


def measurement(config, seconds, group=0, **figures):
    return Measurement(
        **{
            "group": group,
            "config": config,
            "seconds": seconds,
            "decode_seconds": seconds / 2,
            "num_tokens": 100,
            "num_decode_tokens": 90,
            "num_steps": 50,
            "num_draft_tokens": 100,
            "num_accepted_tokens": 50,
            "num_failed_drafts": 0,
            "drafted_by": {"copies": [60, 40], "model": [40, 10]},
            "num_differing": 0,
            "text": "same",
        }
        | figures
    )


def piece(measurements, *, number=0, workload="code", num_running=1):
    return Piece(
        workload=workload,
        round=number,
        configs={one.config: None for one in measurements},
        num_groups=1 + max(one.group for one in measurements),
        num_running=num_running,
        gigabytes_per_second=30.0,
        measurements=measurements,
    )


def summary(*pieces):
    return summaries(pieces, "auto")[pieces[0].workload]


def test_a_ratio_is_of_the_sums_over_groups():
    found = summary(
        piece(
            [
                measurement("plain", 4.0),
                measurement("auto", 1.0),
                measurement("plain", 2.0, 1),
                measurement("auto", 2.0, 1),
            ]
        )
    )
    assert found.ratio("auto", "plain") == pytest.approx(6 / 3)
    assert found.speed("auto") == pytest.approx(200 / 3)


def test_a_ratio_is_the_median_over_rounds():
    found = summary(
        *(piece([measurement("plain", 2.0), measurement("auto", s)], number=n) for n, s in enumerate((1.0, 0.5, 2.0)))
    )
    assert found.ratio("auto", "plain") == pytest.approx(2.0)
    assert found.num_rounds == 3


def test_configurations_are_compared_where_they_took_turns():
    slow_hour = [measurement("plain", 8.0), measurement("auto", 4.0), measurement("b", 8.0)]
    found = summary(
        piece([measurement("plain", 2.0), measurement("auto", 1.0), measurement("a", 1.5)]), piece(slow_hour)
    )
    assert found.ratio("auto", "a") == pytest.approx(1.5)
    assert found.ratio("auto", "b") == pytest.approx(2.0)
    assert found.best_static() == "a"


def test_the_best_static_configuration_may_be_another_for_decoding_alone():
    found = summary(
        piece(
            [
                measurement("plain", 2.0),
                measurement("auto", 1.0),
                measurement("a", 1.5, decode_seconds=1.0),
                measurement("b", 1.6, decode_seconds=0.1),
            ]
        )
    )
    assert (found.best_static(), found.best_static(decoding)) == ("a", "b")


def test_the_worst_group_is_that_of_the_lowest_median_ratio():
    rounds = [
        piece(
            [
                measurement("plain", 1.0),
                measurement("auto", seconds),
                measurement("plain", 1.0, 1),
                measurement("auto", 1.25, 1),
            ],
            number=number,
        )
        for number, seconds in enumerate((1.0, 10.0, 1.0))  # one outlier
    ]
    worst = summary(*rounds).worst_group("auto")
    assert (worst.group, worst.ratio) == (1, pytest.approx(0.8))


def test_steps_have_means_of_tokens_and_rows_and_of_each_drafters_rows():
    steps = summary(piece([measurement("plain", 1.0), measurement("auto", 1.0)])).steps("auto")
    assert (steps.tokens, steps.rows) == (2.0, 3.0)
    assert steps.drafted_rows == {"copies": pytest.approx(1.2), "model": pytest.approx(0.8)}


def test_other_texts_and_failed_drafts_are_problems():
    found = summaries(
        [piece([measurement("plain", 1.0), measurement("auto", 1.0, num_differing=2, num_failed_drafts=1)])], "auto"
    )
    assert [*problems(found)] == [
        "code, auto: 2 text(s) are not plain decoding's",
        "code, auto: the drafter failed 1 time(s)",
    ]


def test_the_report_marks_ratios_below_their_goals():
    pieces = [
        piece([measurement("plain", 5.0), measurement("auto", 1.0), measurement("a", 0.9)]),
        piece([measurement("plain", 1.0), measurement("auto", 1.0)], workload="batch-16", num_running=16),
    ]
    text = io.StringIO()
    show(summaries(pieces, "auto"), Console(file=text, width=250))
    code, batch = (
        next(line for line in text.getvalue().splitlines() if f"| {name} " in line) for name in ("code", "batch-16")
    )
    assert "| 5.000" in code
    assert "**0.900**" in code
    assert "**1.000**" in batch
