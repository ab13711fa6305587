"""The outcome of a comparison, from answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forerun.bench.outcomes import Answers, Rounds, summarise
from forerun.config.speculative_config import resolve_speculative
from forerun.core.stats import SpeculationStats, StepTimes

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
PROMPTS = [[1], [2]]


def rounds(*texts_and_seconds, config=NGRAM):
    """Rounds of one batch each: the texts and the seconds they took, of which one until the first tokens."""
    llm = SimpleNamespace(speculative=resolve_speculative(config))
    answers = [
        Answers(
            texts=texts,
            seconds=seconds,
            decode_seconds=seconds - 1.0,
            num_decode_tokens=sum(map(len, texts)) - len(texts),
            num_failed_drafts=0,
            speculation=SpeculationStats(num_steps=2),
            times=StepTimes(forward=seconds, num_steps=2),
        )
        for texts, seconds in texts_and_seconds
    ]
    return Rounds(kind="chat", name="one", llm=llm, answers=[[batch] for batch in answers])


def outcome(mine, plain, *, is_greedy=True, judge=None):
    return summarise(mine, plain, PROMPTS, is_greedy=is_greedy, judge=judge)


TEXTS = [[3, 4, 5], [6, 7, 8]]


def test_speed_ups_are_medians_of_each_rounds_ratio():
    plain = rounds((TEXTS, 2.0), (TEXTS, 8.0), (TEXTS, 4.0))
    found = outcome(rounds((TEXTS, 2.0), (TEXTS, 2.0), (TEXTS, 3.0)), plain)
    assert found.all_speed_ups == pytest.approx([1.0, 4.0, 4 / 3])
    assert (found.speed_up, found.tokens_per_second) == (pytest.approx(4 / 3), 3.0)
    assert found.decode_speed_up == pytest.approx(3 / 2)


def test_counts_and_times_are_sums_over_rounds():
    found = outcome(rounds((TEXTS, 2.0), (TEXTS, 4.0)), rounds((TEXTS, 2.0), (TEXTS, 4.0)))
    assert found.speculation.num_steps == 4
    assert found.milliseconds_per_step["forward"] == pytest.approx(1500.0)


def test_a_text_that_differs_in_any_round_differs():
    found = outcome(rounds((TEXTS, 2.0), ([[3, 4, 9], [6, 7, 8]], 2.0)), rounds((TEXTS, 2.0), (TEXTS, 2.0)))
    assert found.texts == "1 of 2 differ"


def test_near_ties_are_looked_for_where_the_texts_part():
    seen = []

    def judge(llm, text, token, other):
        seen.append((text, token, other))
        return True

    found = outcome(rounds(([[3, 9, 9], [6, 7, 8]], 2.0)), rounds((TEXTS, 2.0)), judge=judge)
    assert seen == [([1, 3], 4, 9)]
    assert found.texts == "1 of 2 differ, 1 by near-ties"


@pytest.mark.parametrize("order", [1, -1])
def test_a_text_that_differs_by_more_than_a_near_tie_in_any_round_is_none(order):
    other_texts = [([[3, 9, 9], [6, 7, 8]], 2.0), ([[3, 4, 9], [6, 7, 8]], 2.0)][::order]
    found = outcome(
        rounds(*other_texts), rounds((TEXTS, 2.0), (TEXTS, 2.0)), judge=lambda _llm, text, *_: text == [1, 3]
    )
    assert found.texts == "1 of 2 differ"


def test_that_a_text_just_ends_is_never_a_near_tie():
    found = outcome(rounds(([[3, 4], [6, 7, 8]], 2.0)), rounds((TEXTS, 2.0)), judge=lambda *_: True)
    assert (found.num_differing, found.num_near_ties) == (1, 0)


@pytest.mark.parametrize(
    ("verifier", "is_greedy", "texts"),
    [
        ({}, False, "1 of 2 differ"),
        ({"rejection_sample_method": "standard"}, True, "1 of 2 differ"),
        ({"rejection_sample_method": "standard"}, False, "1 of 2 differ (sampled anew)"),
        ({"rejection_sample_method": "typical"}, True, "1 of 2 differ (lossy)"),
    ],
)
def test_what_a_difference_means_depends_on_the_verifier(verifier, is_greedy, texts):
    mine = rounds(([[3, 4, 9], [6, 7, 8]], 2.0), config={**NGRAM, **verifier})
    assert outcome(mine, rounds((TEXTS, 2.0)), is_greedy=is_greedy).texts == texts
