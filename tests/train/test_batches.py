"""Heads are trained on the same features that the engine gives them."""

from __future__ import annotations

from itertools import islice

import torch

from forerun.train.batches import observe, shuffled
from tests.engines import tiny_target
from tests.models.paged_run import PagedRun

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], list(range(40))]
FEATURES = frozenset({"last_hidden", "hidden.0", "hidden.2"})


def test_features_and_logits_are_those_of_the_texts_alone():
    batch = observe(tiny_target(), TEXTS, FEATURES)
    assert batch.token_ids.shape == (3, 40)
    for row, text in enumerate(TEXTS):
        assert batch.token_ids[row, : len(text)].tolist() == text
        assert batch.is_text[row].tolist() == [True] * len(text) + [False] * (40 - len(text))
        alone = PagedRun(tiny_target().model).feed(text, features=FEATURES)
        torch.testing.assert_close(batch.logits[row, : len(text)], alone.logits, rtol=1e-4, atol=1e-4)
        for name in FEATURES:
            torch.testing.assert_close(
                batch.features[name][row, : len(text)], alone.features[name], rtol=1e-4, atol=1e-4
            )


def test_each_round_takes_every_text_once_in_an_order_of_its_own():
    texts = [[i, i] for i in range(10)]
    taken = [text[0] for chosen in islice(shuffled(texts, size=4, seed=0), 10) for text in chosen]
    rounds = [taken[first : first + 10] for first in range(0, 40, 10)]
    assert all(sorted(one) == list(range(10)) for one in rounds)
    assert len({tuple(one) for one in rounds}) == 4


def test_a_batch_may_be_larger_than_all_texts():
    (chosen,) = islice(shuffled([[1, 1], [2, 2]], size=5, seed=0), 1)
    assert len(chosen) == 5
