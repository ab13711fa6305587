"""The guard between engine and drafter."""

from __future__ import annotations

import pytest
import torch

from forerun.core.draft import NO_DRAFT, Draft
from forerun.drafters.guard import check_draft, cut_draft
from forerun.errors import DraftError


@pytest.mark.parametrize(
    "draft",
    [
        Draft((7,)),
        Draft((-1,)),
        Draft((1, 2), (-1,)),
        Draft((1, 2), (1, -1)),
        Draft((1, 2), (-1, -2)),
        Draft((1, 2), (-1, 1)),
        Draft((1, 2), None, torch.ones(2, 6)),
        Draft((1,), source=["me"]),
    ],
)
def test_an_impossible_draft_is_refused(draft):
    with pytest.raises(DraftError):
        check_draft(draft, vocab_size=7)


@pytest.mark.parametrize(
    "draft", [NO_DRAFT, Draft((0, 6)), Draft((1, 1, 2), (-1, -1, 0)), Draft((1,), None, torch.ones(1, 7))]
)
def test_a_possible_draft_passes(draft):
    check_draft(draft, vocab_size=7)


def test_a_chain_is_cut_to_the_lower_limit():
    assert cut_draft(Draft((1, 2, 3, 4)), max_tokens=3, max_depth=2) == Draft((1, 2))


def test_a_cut_draft_keeps_its_source():
    chain, tree = Draft((1, 2, 3), source="me"), Draft((1, 2, 3), (-1, 0, 0), source="me")
    assert [cut_draft(draft, max_tokens=3, max_depth=1).source for draft in (chain, tree)] == ["me", "me"]


def test_a_tree_loses_its_deep_nodes_and_keeps_its_shape():
    tree = Draft((10, 11, 12, 13, 14), (-1, 0, 1, -1, 3))
    assert cut_draft(tree, max_tokens=9, max_depth=2) == Draft((10, 11, 13, 14), (-1, 0, -1, 2))
    assert cut_draft(tree, max_tokens=2, max_depth=3) == Draft((10, 11), (-1, 0))
