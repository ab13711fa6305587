"""Heads are trained on the same features that the engine gives them."""

from __future__ import annotations

import torch

from forerun.train.target import observe
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
