"""What a head learns from equals what the target computes for each text alone, whatever is beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forerun.train.observer import Observer
from forerun.train.selection import LearnedText
from tests.engines import native_target, tiny_target
from tests.models.paged_run import PagedRun
from tests.native import needs_kernels

FEATURES = ("hidden.0", "hidden.1")
DRAFT_IDS = torch.tensor([0, 3, 4, 9, 40])
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], list(range(40))]
PLACES = [[2, 3, 6], [1], list(range(7, 39))]


def learned(texts=TEXTS, places=PLACES):
    return [
        LearnedText(number=number, token_ids=np.array(ids), places=np.array(at))
        for number, (ids, at) in enumerate(zip(texts, places, strict=True))
    ]


def test_features_and_probabilities_are_those_of_the_texts_alone():
    observer = Observer(tiny_target(), FEATURES, DRAFT_IDS)
    observed = observer.observe(learned())
    assert observed.token_ids.shape == (3, 40)
    first = 0
    for row, (text, places) in enumerate(zip(TEXTS, PLACES, strict=True)):
        assert observed.token_ids[row, : len(text)].tolist() == text
        alone = PagedRun(tiny_target().model).feed(text, features=frozenset(FEATURES))
        for name in FEATURES:
            found = observed.features[name][row, : len(text) - 1]
            torch.testing.assert_close(found, alone.features[name][:-1], rtol=1e-4, atol=1e-4)
        rows = slice(first, first + len(places))
        assert observed.rows[rows].tolist() == [row] * len(places)
        assert observed.places[rows].tolist() == places
        expected = alone.logits[places].softmax(-1)[:, DRAFT_IDS]
        torch.testing.assert_close(observed.wanted[rows], expected, rtol=1e-3, atol=1e-4)
        first += len(places)


@needs_kernels
def test_on_the_kernels_other_texts_and_earlier_batches_change_no_bit():
    observer = Observer(native_target(), FEATURES, DRAFT_IDS)
    together = observer.observe(learned())
    for row, one in enumerate(learned()):
        alone = observer.observe([one])
        length = len(one.token_ids)
        assert torch.equal(alone.wanted, together.wanted[together.rows == row])
        assert all(torch.equal(alone.features[n][0], together.features[n][row, :length]) for n in FEATURES)


@pytest.mark.parametrize("count", [1, 300])
def test_probabilities_are_not_renormalised_over_the_drafted_tokens(count):
    text = [[i % 90 for i in range(count + 2)]]
    observed = Observer(tiny_target(), FEATURES, DRAFT_IDS).observe(learned(text, [list(range(count))]))
    assert (observed.wanted.sum(-1) < 0.9).all()
