"""The guard between engine and drafter."""

from __future__ import annotations

import math

import pytest
import torch

from forerun.core.draft import NO_DRAFT, Draft
from forerun.drafters.base import DraftRequest
from forerun.drafters.guard import GuardedDrafter, check_draft, cut_draft
from forerun.errors import DraftError
from tests.drafters.texts import VOCAB_SIZE, sequence


class Fragile:
    """Drafts one token for each sequence that it has started; fails where the test says so."""

    needs = frozenset()

    def __init__(self):
        self.fails = False
        self.refused = set()
        self.known = []

    def start(self, sequence):
        if sequence.seq_id in self.refused:
            raise RuntimeError("not this one")
        self.known.append(sequence.seq_id)

    def propose(self, context):
        if self.fails:
            raise RuntimeError("not today")
        assert all(request.sequence.seq_id in self.known for request in context.requests)
        return [Draft((request.sequence.seq_id,)) for request in context.requests]

    def stop(self, sequence):
        self.known.remove(sequence.seq_id)


def started(guarded, *seq_ids):
    """Requests for new sequences, and a function that drafts for them."""
    sequences = [sequence([1, 2], seq_id=seq_id) for seq_id in seq_ids]
    for one in sequences:
        guarded.start(one)
    return sequences, lambda: guarded.propose([DraftRequest(one, 4, 4) for one in sequences], {})


def test_a_drafter_that_failed_is_asked_again_in_the_next_step():
    drafter = Fragile()
    guarded = GuardedDrafter(drafter, vocab_size=VOCAB_SIZE)
    _, drafts = started(guarded, 1, 2)
    drafter.fails = True
    assert drafts() == [NO_DRAFT, NO_DRAFT]
    drafter.fails = False
    assert drafts() == [Draft((1,)), Draft((2,))]
    assert guarded.num_failures == 1


def test_one_draft_in_place_of_a_list_of_one_is_a_failure_of_that_call():
    drafter = Fragile()
    drafter.propose = lambda context: Draft((1,))
    guarded = GuardedDrafter(drafter, vocab_size=VOCAB_SIZE)
    _, drafts = started(guarded, 1)
    assert drafts() == [NO_DRAFT]
    assert guarded.num_failures == 1


def test_drafts_stay_with_their_sequences_where_a_drafter_sorts_its_requests(caplog):
    drafter = Fragile()

    def propose(context):
        context.requests.sort(key=lambda request: -request.sequence.seq_id)
        return [Draft((request.sequence.seq_id,)) for request in context.requests]

    drafter.propose = propose
    _, drafts = started(GuardedDrafter(drafter, vocab_size=VOCAB_SIZE), 1, 2)
    assert drafts() == [NO_DRAFT, NO_DRAFT]
    assert "has no attribute 'sort'" in caplog.text


def test_a_text_that_a_drafter_has_drafted_into_is_cut_back_and_the_draft_dropped(caplog):
    drafter = Fragile()

    def propose(context):
        path = context.requests[0].sequence.output_ids
        path += [3, 4]
        return [Draft(tuple(path)), Draft((5,))]

    drafter.propose = propose
    sequences, drafts = started(GuardedDrafter(drafter, vocab_size=VOCAB_SIZE), 1, 2)
    assert drafts() == [NO_DRAFT, NO_DRAFT]
    assert [one.tokens_from(0) for one in sequences] == [[1, 2], [1, 2]]
    assert "propose changed the prompt_ids or output_ids of a sequence" in caplog.text


def shorten(output_ids):
    output_ids.pop()


def replace_last(output_ids):
    output_ids[-1] = 7


def shorten_and_fail(output_ids):
    output_ids.pop()
    raise RuntimeError("not today")


@pytest.mark.parametrize("change", [shorten, replace_last, shorten_and_fail])
def test_a_text_that_a_drafter_has_changed_is_what_it_was(change):
    drafter = Fragile()

    def propose(context):
        change(context.requests[1].sequence.output_ids)
        return [Draft((5,)), Draft((5,))]

    drafter.propose = propose
    guarded = GuardedDrafter(drafter, vocab_size=VOCAB_SIZE)
    sequences, drafts = started(guarded, 1, 2)
    for one in sequences:
        one.output_ids += [8, 9]
    assert drafts() == [NO_DRAFT, NO_DRAFT]
    assert [one.output_ids[-2:] for one in sequences] == [[8, 9], [8, 9]]
    assert guarded.num_failures == 1


def lengthen(prompt_ids):
    prompt_ids.append(7)


@pytest.mark.parametrize("change", [shorten, replace_last, shorten_and_fail, lengthen])
@pytest.mark.parametrize("where", ["start", "propose"])
def test_a_prompt_that_a_drafter_has_changed_is_what_it_was(change, where):
    drafter = Fragile()
    setattr(
        drafter, where, lambda given: change((given if where == "start" else given.requests[0].sequence).prompt_ids)
    )
    guarded = GuardedDrafter(drafter, vocab_size=VOCAB_SIZE)
    sequences, drafts = started(guarded, 1, 2)
    assert drafts() == [NO_DRAFT, NO_DRAFT]
    assert [one.prompt_ids for one in sequences] == [[1, 2], [1, 2]]
    assert guarded.num_failures > 0


def test_what_else_an_empty_draft_says_goes_no_further():
    drafter = Fragile()
    drafter.propose = lambda _: [Draft((), (-1,), source=["me"]), Draft((), survival=0, sources=3)]
    guarded = GuardedDrafter(drafter, vocab_size=VOCAB_SIZE, source="fragile")
    _, drafts = started(guarded, 1, 2)
    assert all(draft is NO_DRAFT for draft in drafts())


def test_a_sequence_that_cannot_be_started_costs_the_others_no_drafts_and_is_tried_again():
    drafter = Fragile()
    drafter.refused = {2}
    guarded = GuardedDrafter(drafter, vocab_size=VOCAB_SIZE)
    sequences, drafts = started(guarded, 1, 2, 3)
    assert drafts() == [Draft((1,)), NO_DRAFT, Draft((3,))]
    assert guarded.num_failures == 2
    drafter.refused = set()
    assert drafts() == [Draft((1,)), Draft((2,)), Draft((3,))]
    assert guarded.num_failures == 2
    for one in sequences:
        guarded.stop(one)
        guarded.stop(one)
    assert drafter.known == []
    assert guarded.num_failures == 2


def test_failures_of_a_drafter_whose_place_was_taken_still_count_and_its_successors_first_is_logged(caplog):
    class Group(Fragile):
        num_member_failures = 3

    guarded = GuardedDrafter(Group(), vocab_size=VOCAB_SIZE)
    sequences, drafts = started(guarded, 1)
    guarded.drafter.fails = True
    drafts()
    assert guarded.num_failures == 4
    guarded.replace(Fragile(), sequences)
    assert guarded.num_failures == 4
    guarded.drafter.fails = True
    caplog.clear()
    drafts()
    assert guarded.num_failures == 5
    assert "drafter Fragile failed (not today)" in caplog.text


def test_a_sequence_is_started_once_however_often_the_engine_says_so():
    drafter = Fragile()
    guarded = GuardedDrafter(drafter, vocab_size=VOCAB_SIZE)
    (one,), _ = started(guarded, 7)
    guarded.start(one)
    assert drafter.known == [7]


@pytest.mark.parametrize(
    "draft",
    [
        Draft((7,)),
        Draft((-1,)),
        Draft((1, 2), (-1,)),
        Draft((1, 2), (1, -1)),
        Draft((1, 2), (-1, -2)),
        Draft((1, 2), (-1, 1)),
        Draft((1, 2), [-1, 0]),
        Draft([1, 2]),
        Draft((1, 2), None, torch.full((2, 6), 1 / 6)),
        Draft((1,), None, torch.ones(1, 7)),
        Draft((1,), None, torch.full((1, 7), 1 / 7), survival=(0.5,)),
        Draft((1,), None, torch.tensor([[2.0, -1.0, 0, 0, 0, 0, 0]])),
        Draft((1,), None, torch.tensor([[1.0, 0, 0, 0, 0, 0, 0]])),
        Draft((1,), None, torch.full((1, 7), 1 / 7).numpy()),
        Draft((1,), None, torch.tensor([[1.0, math.nan, 0, 0, 0, 0, 0]])),
        Draft((1,), None, torch.tensor([[1.0, -math.inf, 0, 0, 0, 0, 0]])),
        Draft((1,), source=["me"]),
        Draft((1, 2), source="me", sources=("me",)),
        Draft((1, 2), source="me", sources=("me", 2)),
        Draft((1, 2), survival=(0.5,)),
        Draft((1, 2), survival=(0.5, 0.6)),
        Draft((1, 2), survival=(1.5, 0.5)),
        Draft((1,), survival=(math.nan,)),
    ],
)
def test_an_impossible_draft_is_refused(draft):
    with pytest.raises(DraftError):
        check_draft(draft, vocab_size=7)


@pytest.mark.parametrize(
    "draft", [NO_DRAFT, Draft((0, 6)), Draft((1, 1, 2), (-1, -1, 0)), Draft((1,), None, torch.full((1, 7), 1 / 7))]
)
def test_a_possible_draft_passes(draft):
    check_draft(draft, vocab_size=7)


def test_a_chain_is_cut_to_the_lower_limit():
    assert cut_draft(Draft((1, 2, 3, 4)), max_tokens=3, max_depth=2) == Draft((1, 2))


def test_a_cut_draft_keeps_the_chances_of_its_nodes():
    draft = Draft((1, 2, 3), (-1, -1, 0), survival=(0.6, 0.3, 0.2))
    assert cut_draft(draft, max_tokens=9, max_depth=1).survival == (0.6, 0.3)
    assert cut_draft(draft, max_tokens=1, max_depth=9).survival == (0.6,)
    assert draft.only([0, 2]).survival == (0.6, 0.2)


def test_a_cut_draft_keeps_its_source():
    chain, tree = Draft((1, 2, 3), source="me"), Draft((1, 2, 3), (-1, 0, 0), source="me")
    assert [cut_draft(draft, max_tokens=3, max_depth=1).source for draft in (chain, tree)] == ["me", "me"]


def test_a_tree_loses_its_deep_nodes_and_keeps_its_shape():
    tree = Draft((10, 11, 12, 13, 14), (-1, 0, 1, -1, 3))
    assert cut_draft(tree, max_tokens=9, max_depth=2) == Draft((10, 11, 13, 14), (-1, 0, -1, 2))
    assert cut_draft(tree, max_tokens=2, max_depth=3) == Draft((10, 11), (-1, 0))


def test_a_drafter_that_does_not_learn_is_shown_nothing():
    guarded = GuardedDrafter(Fragile(), vocab_size=VOCAB_SIZE)
    assert guarded.num_candidates == 0
    guarded.learn(None)
    assert guarded.num_failures == 0


def test_a_drafter_that_learns_is_never_promised_more_candidates_than_there_are_tokens():
    learner = Fragile()
    learner.num_candidates, learner.learn = VOCAB_SIZE + 1, lambda _: 1 / 0
    guarded = GuardedDrafter(learner, vocab_size=VOCAB_SIZE)
    assert guarded.num_candidates == VOCAB_SIZE
    guarded.learn(None)
    assert guarded.num_failures == 1


def test_drafts_that_do_not_say_who_made_them_get_the_drafters_name():
    class Two:
        def propose(self, context):
            return [Draft((1, 2), (-1, -1), survival=(0.5, 0.2)), Draft((3,), source="copies"), NO_DRAFT]

    requests = [DraftRequest(sequence([1], seq_id=i), 4, 4) for i in range(3)]
    guarded = GuardedDrafter(Two(), vocab_size=VOCAB_SIZE, source="two")
    assert guarded.propose(requests, {}) == [
        Draft((1, 2), (-1, -1), source="two", survival=(0.5, 0.2)),
        Draft((3,), source="copies"),
        NO_DRAFT,
    ]
