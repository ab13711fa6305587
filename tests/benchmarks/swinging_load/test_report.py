"""Requests per second at equal latency, of made-up runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from benchmarks.swinging_load.loading import LoadResult
from benchmarks.swinging_load.report import Runs, mean_latency, p95_latency, show


def result(config, pace, latency, *, seconds=None, number=0, texts=("a", "b")):
    return LoadResult(
        config=config,
        pace=pace,
        round=number,
        seconds=10.0 / pace if seconds is None else seconds,
        num_requests=20,
        num_tokens=200,
        most_running=9,
        mean_latency=latency,
        p95_latency=2 * latency,
        mean_ttft=0.1,
        mean_tpot=0.01,
        texts=[*texts],
    )


PLAIN = [result("plain", 1.0, 2.0), result("plain", 2.0, 4.0), result("plain", 3.0, 8.0)]


def test_all_are_compared_at_plain_decodings_latency_at_the_middle_pace():
    runs = Runs(PLAIN)
    assert runs.latency_goal(mean_latency) == 4.0
    assert runs.latency_goal(p95_latency) == 8.0
    assert runs.requests_per_second_at("plain", 4.0, mean_latency) == pytest.approx(4.0)


def test_between_two_paces_requests_per_second_go_straight():
    runs = Runs([*PLAIN, result("auto", 2.0, 3.0), result("auto", 3.0, 7.0)])
    assert runs.requests_per_second_at("auto", 4.0, mean_latency) == pytest.approx(4.0 + 2.0 / 4)


def test_beyond_the_paces_nothing_is_made_up():
    runs = Runs([*PLAIN, result("quick", 1.0, 1.0), result("quick", 3.0, 3.5)])
    assert runs.requests_per_second_at("quick", 4.0, mean_latency) is None


def test_rounds_are_summed_up_by_their_medians():
    runs = Runs([*PLAIN, *(result("plain", 2.0, latency, number=n) for n, latency in enumerate((5.0, 100.0), 1))])
    assert runs.latency_goal(mean_latency) == 5.0


def test_texts_other_than_plain_decodings_are_a_problem():
    runs = Runs([*PLAIN, result("auto", 1.0, 1.0), result("auto", 2.0, 1.0, texts=("a", "c"))])
    assert [*runs.problems()] == ["auto: 1 text(s) are not plain decoding's"]


def test_the_report_compares_with_plain_decoding():
    text = io.StringIO()
    show(Runs([*PLAIN, result("auto", 2.0, 3.0), result("auto", 3.0, 5.0)]), Console(file=text, width=200))
    (row,) = [line for line in text.getvalue().splitlines() if line.startswith("| auto")]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["auto", "5.00", "1.25", "5.00", "1.25"]


def test_a_configuration_that_is_quicker_at_all_paces_is_said_to_serve_more_than_it_was_given():
    text = io.StringIO()
    show(Runs([*PLAIN, result("auto", 2.0, 3.0), result("auto", 3.0, 3.5)]), Console(file=text, width=200))
    (row,) = [line for line in text.getvalue().splitlines() if line.startswith("| auto")]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells == ["auto", "above 6.00", "above 1.50", "above 6.00", "above 1.50"]
