"""The arithmetic of one rejection."""

import math

import pytest
import torch

from forerun.core.draft import Draft
from forerun.verify.rejection import acceptance_ratio, excess

TARGET = torch.tensor([0.5, 0.3, 0.2, 0.0])


def drawn_from(*row):
    return Draft((0,), None, torch.tensor([row]))


def test_a_sampled_draft_is_accepted_by_the_ratio():
    assert acceptance_ratio(TARGET, drawn_from(0.25, 0.75, 0.0, 0.0), 0) == 2.0


def test_a_certain_draft_is_accepted_by_its_target_probability():
    assert acceptance_ratio(TARGET, Draft((1,)), 0) == pytest.approx(0.3)


def test_a_draft_probability_that_underflowed_accepts_what_the_target_allows():
    probs = torch.zeros(2, 4)
    assert [acceptance_ratio(TARGET, Draft((0, 3), None, probs), node) for node in (0, 1)] == [math.inf, 0.0]


def test_a_sampled_draft_leaves_what_it_did_not_cover():
    left = excess(TARGET, drawn_from(0.1, 0.9, 0.0, 0.0), 0)
    assert left.tolist() == pytest.approx([0.4, 0.0, 0.2, 0.0])


def test_a_certain_draft_leaves_all_other_tokens():
    assert excess(TARGET, Draft((0,)), 0).tolist() == pytest.approx([0.0, 0.3, 0.2, 0.0])


@pytest.mark.parametrize("draft", [Draft((0,)), drawn_from(0.1, 0.9, 0.0, 0.0)], ids=["certain", "sampled"])
def test_the_targets_probabilities_are_not_changed(draft):
    probs = TARGET.clone()
    excess(probs, draft, 0)
    assert torch.equal(probs, TARGET)
