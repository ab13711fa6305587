"""Batches are a function of the seed and the step: every epoch has each text once, and a later start changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.train.batches import Batches
from forerun.train.selection import LearnedText


def texts(lengths):
    return [
        LearnedText(number=index, token_ids=np.full(length, index), places=np.arange(length - 1))
        for index, length in enumerate(lengths)
    ]


def numbers(parts):
    return [int(text.token_ids[0]) for part in parts for text in part]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 100), st.integers(1, 60))
def test_every_epoch_has_each_text_once(lengths, batch_tokens, pass_tokens):
    batches = Batches(texts(lengths), batch_tokens=batch_tokens, pass_tokens=pass_tokens, seed=1)
    found, step = [], 0
    while len(found) < 3 * len(lengths):
        found += numbers(batches.parts(step))
        step += 1
    for first in range(0, 3 * len(lengths), len(lengths)):
        assert sorted(found[first : first + len(lengths)]) == list(range(len(lengths)))


def test_batches_have_as_many_tokens_on_average_as_they_are_asked_to_have():
    lengths = [50 + 37 * number % 400 for number in range(2000)]
    batches, num_steps = Batches(texts(lengths), batch_tokens=1000, pass_tokens=1000, seed=1), 300
    num_tokens = sum(len(text.token_ids) for step in range(num_steps) for part in batches.parts(step) for text in part)
    assert num_tokens / num_steps == pytest.approx(1000, rel=0.02)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 100))
def test_the_mean_of_a_batch_says_how_many_make_an_epoch(lengths, batch_tokens):
    batches = Batches(texts(lengths), batch_tokens=batch_tokens, pass_tokens=60, seed=1)
    num_batches = round(sum(lengths) / batches.mean_tokens)
    found = [number for step in range(num_batches) for number in numbers(batches.parts(step))]
    assert sorted(found) == list(range(len(lengths)))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 60))
def test_no_part_is_larger_than_a_pass_unless_one_text_is(lengths, pass_tokens):
    batches = Batches(texts(lengths), batch_tokens=90, pass_tokens=pass_tokens, seed=1)
    for part in batches.parts(0):
        assert part
        assert len(part) == 1 or len(part) * max(len(text.token_ids) for text in part) <= pass_tokens


def test_epochs_differ():
    batches = Batches(texts([10] * 12), batch_tokens=120, pass_tokens=120, seed=0)
    assert numbers(batches.parts(0)) != numbers(batches.parts(1))


def test_whoever_begins_later_gets_the_same():
    lengths = [7, 30, 12, 5, 25, 9]
    first, second = (Batches(texts(lengths), batch_tokens=40, pass_tokens=40, seed=2) for _ in range(2))
    expected = [numbers(first.parts(step)) for step in range(9)]
    assert [numbers(second.parts(step)) for step in reversed(range(9))] == expected[::-1]
