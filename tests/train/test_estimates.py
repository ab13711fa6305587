"""An estimate divides the budget as the run does, and refuses what trains nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.errors import ConfigError
from forerun.train.estimates import CURVE, Estimate, Rates, count_steps, expected_length
from forerun.train.probing import WritingPace

RATES = Rates(
    writing=1000.0,
    training=500.0,
    measuring=30.0,
    timing=4.0,
    per_text=200.0,
    overhead=1.25,
    num_weights=10,
    memory_bytes=7,
)


def estimate(rates=RATES, **changes):
    asked = {
        "budget": 1000.0,
        "count": None,
        "epochs": None,
        "shares": (0.4, 0.5),
        "most_epochs": 8.0,
        "kept_at": (0, 0),
    }
    return Estimate.of(rates, **(asked | changes))


def test_a_budget_is_divided_into_writing_and_training():
    found = estimate()
    assert (found.num_written, found.write_seconds) == (400_000, 400)
    assert found.train_seconds == pytest.approx(500)
    assert found.num_trained == pytest.approx(250_000)


def test_what_is_not_written_is_left_to_train():
    found = estimate(count=500)
    assert found.num_written == 100_000
    assert found.train_seconds == pytest.approx(900 - 100)


def test_each_head_that_will_be_kept_is_measured_and_stored():
    few, more = (estimate(kept_at=at) for at in ((0, 0, 1e6, 2e6), (0, 0, 1e5, 2e5, 1e6)))
    assert few.measure_seconds == pytest.approx(2 * 30 + 4)
    assert more.measure_seconds == pytest.approx(4 * 30 + 4)
    assert more.disk_bytes > few.disk_bytes


def test_epochs_are_a_limit_within_the_budget_and_all_without_one():
    assert estimate(epochs=0.4).num_trained == pytest.approx(0.4 * 500_000)
    assert estimate(epochs=100).num_trained == pytest.approx(250_000)
    assert estimate(epochs=3.0, budget=None, count=10_000).num_trained == pytest.approx(3 * 2_500_000)


def test_texts_that_are_written_already_take_no_time():
    found = estimate(num_written=1_000_000)
    assert found.write_seconds == 0
    assert found.train_seconds == pytest.approx(900)


@pytest.mark.parametrize("changes", [{"budget": 120.0}, {"count": 3}, {"epochs": 0.1}])
def test_too_little_to_train_anything_is_refused(changes):
    with pytest.raises(ConfigError, match="steps, and at least 80 of 2048 tokens are needed"):
        count_steps(estimate(**changes).num_trained)


@pytest.mark.parametrize("batch_tokens", [2048, 8192])
def test_steps_are_counted_by_their_tokens(batch_tokens):
    assert count_steps(80 * batch_tokens, batch_tokens) == 80
    with pytest.raises(ConfigError, match=f"are 79 steps, and at least 80 of {batch_tokens} tokens are needed"):
        count_steps(79 * batch_tokens, batch_tokens)


def test_the_expected_length_rises_with_the_tokens_and_stays_within_the_curve():
    lengths = [expected_length(10.0**exponent) for exponent in range(12)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 1.0
    assert lengths[-1] == CURVE[-1][1]


def test_the_pace_of_writing_leaves_out_the_beginning_and_the_end():
    pace = WritingPace()
    for seconds, generated in ((0.0, 0), (3.0, 100), (4.0, 1100), (5.0, 2100)):
        pace.note(seconds, generated)
    pace.num_generated, pace.num_answers = 4000, 3000  # at the end, when few conversations were left
    assert pace.answers_per_second == pytest.approx(1000 * 3 / 4)


def test_too_short_a_while_has_no_pace():
    pace = WritingPace(num_generated=10, num_answers=10)
    pace.note(0.0, 5)
    assert pace.answers_per_second is None


def test_features_that_are_kept_take_room():
    without, kept = estimate(), estimate(replace(RATES, kept_bytes=1000))
    assert kept.disk_bytes - without.disk_bytes == pytest.approx(400_000 * 1.25 * 1000)


def test_a_state_has_room_beside_the_one_that_it_replaces():
    without, with_weights = (estimate(replace(RATES, num_weights=number)).disk_bytes for number in (0, 1000))
    of_a_state, of_a_head, num_heads = 1000 * 3 * 4, 1000 * 2, 2
    assert with_weights - without == pytest.approx(2 * of_a_state + (num_heads + 1) * of_a_head)
