"""Drafts under a grammar lose what cannot stand, gain what must come, and stay exact under every verifier."""

from __future__ import annotations

import functools
import itertools
from itertools import pairwise

import pytest
import torch

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sampling_params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftRequest
from forerun.drafters.guard import GuardedDrafter
from forerun.drafters.prediction import FIRST_MATCH, survival
from forerun.grammar.drafting import KnownTexts, goes_beyond, within
from forerun.ops.sampling import SamplingRules
from tests.grammars import OneOf
from tests.verify.exact import continuations, largest_error, random_model, reversed_model, sampled_drafts
from tests.verify.test_exact import JUDGES, SHAPES, depth

VOCAB_SIZE = 3
LENGTH = 4
TEXTS = [t for t in itertools.product(range(VOCAB_SIZE), repeat=LENGTH) if t[0] != 1 and 2 not in map(sum, pairwise(t))]
"""What the grammar of these tests allows: some token is forbidden at once, some after each other."""

GRAMMAR = OneOf(TEXTS, vocab_size=VOCAB_SIZE)


def under_grammar(model):
    """The model without the tokens that the grammar forbids."""

    @functools.cache
    def probs(path):
        row = torch.tensor(model(path), dtype=torch.float64) * GRAMMAR.allowed((), path)
        return (row / row.sum()).tolist() if row.sum() else model(path)  # after the end anything goes

    return probs


FREE = random_model("target", vocab_size=VOCAB_SIZE)
TARGET = under_grammar(FREE)
DRAFTERS = [random_model("draft", vocab_size=VOCAB_SIZE), reversed_model(FREE)]


def test_the_grammar_of_these_tests_forbids_something_at_every_depth():
    for length in range(3):
        reached = [path for path, prob in continuations(TARGET, (), length=length) if prob]
        assert all(min(TARGET(path)) == 0.0 < sum(TARGET(path)) for path in reached)


@pytest.mark.parametrize("replacement", [True, False], ids=["with replacement", "without replacement"])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=["random", "adversary"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("judge", JUDGES.values(), ids=JUDGES)
def test_cut_sampled_drafts_leave_the_targets_distribution_exactly(judge, shape, drafter, replacement):
    drafts = list(sampled_drafts(shape, drafter, vocab_size=VOCAB_SIZE, replacement=replacement))
    cut = [(within(draft, GRAMMAR, ()), weight) for draft, weight in drafts]
    assert sum(len(draft) for draft, _ in cut) < sum(len(draft) for draft, _ in drafts) or depth(shape) < 2
    assert largest_error(judge, cut, TARGET, length=depth(shape) + 1) < 1e-9


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("judge", JUDGES.values(), ids=JUDGES)
def test_cut_certain_drafts_leave_the_targets_distribution_exactly(judge, shape):
    for token_ids in itertools.product(range(VOCAB_SIZE), repeat=len(shape)):
        certain = [(within(Draft(token_ids, shape), GRAMMAR, ()), 1.0)]
        assert largest_error(judge, certain, TARGET, length=depth(shape) + 1) < 1e-9, token_ids


def test_a_sampled_draft_cut_before_the_forbidden_token_would_be_biased():
    drafts = sampled_drafts((-1, 0), DRAFTERS[0], vocab_size=VOCAB_SIZE, replacement=True)
    cut = [(draft.first(GRAMMAR.num_possible((), draft.token_ids)), weight) for draft, weight in drafts]
    assert largest_error(JUDGES["rejection"], cut, TARGET, length=2) > 1e-3


def test_only_possible_nodes_of_a_tree_are_left():
    grammar = OneOf([(0, 1, 2), (0, 2, 2), (3, 0, 0)], vocab_size=4)
    tree = Draft((1, 0, 3, 2, 2, 0, 2, 3), (-1, -1, -1, 0, 1, 2, 4, 4), source="some")
    assert within(tree, grammar, ()) == Draft((0, 3, 2, 0, 2), (-1, -1, 0, 1, 2), source="some")
    assert within(Draft((0, 1, 1)), grammar, ()) == Draft((0, 1))
    assert within(Draft((1, 2)), grammar, ()) == NO_DRAFT
    assert within(Draft((2, 2)), grammar, (0,)) == Draft((2, 2))


def test_of_a_sampled_tree_the_first_impossible_nodes_are_left_with_their_odds():
    grammar = OneOf([(0, 1), (1, 0)], vocab_size=3)
    probs = torch.rand(5, 3)
    cut = within(Draft((2, 0, 0, 0, 1), (-1, -1, 0, 1, 1), probs), grammar, ())
    assert (cut.token_ids, cut.parents) == ((2, 0, 0, 1), (-1, -1, 1, 1))
    assert torch.equal(cut.probs, probs[[0, 1, 3, 4]])


@pytest.mark.parametrize(
    ("draft", "expected"),
    [
        (Draft((1, 2, 0)), True),
        (Draft((1, 2)), False),
        (Draft((1, 0, 2)), False),
        (NO_DRAFT, False),
        (Draft((0, 1, 1, 2, 0), (-1, -1, -1, 2, 3)), True),
        (Draft((0, 1, 2, 0), (-1, -1, 1, 1)), False),
    ],
)
def test_a_draft_goes_beyond_forced_tokens_or_not(draft, expected):
    assert goes_beyond(draft, (1, 2)) is expected


class Says:
    """A drafter that gives the drafts that it is handed, and notes whom it was asked for."""

    needs = frozenset()

    def __init__(self, *drafts):
        self.drafts = list(drafts)
        self.num_asked = 0

    def propose(self, context):
        self.num_asked += len(context.requests)
        return [self.drafts.pop(0) for _ in context.requests]


def request_of(grammar, *, max_tokens=4, max_depth=4, prediction=(), seq_id=0):
    sequence = Sequence(
        seq_id=seq_id, prompt_ids=[0], output_ids=[], sampling=SamplingParams(), seed=0, prediction_ids=prediction
    )
    rules = SamplingRules(sequence.sampling, prompt_ids=[0], vocab_size=4, grammar=grammar)
    return DraftRequest(sequence, max_tokens, max_depth, rules=rules)


TWO = [(1, 2, 0, 3, 3, 3), (1, 2, 1, 0, 3, 3)]
FORCED = Draft((1, 2), source="grammar")


@pytest.mark.parametrize(
    ("drafted", "expected"),
    [
        (NO_DRAFT, FORCED),
        (Draft((3, 3, 3)), FORCED),
        (Draft((1, 2)), FORCED),
        (Draft((1, 2, 1, 0), source="own"), Draft((1, 2, 1, 0), source="own")),
        (Draft((1, 2, 1, 3), source="own"), Draft((1, 2, 1), source="own")),
        (Draft((1, 2, 1, 0), probs=torch.ones(4, 4)), FORCED),
    ],
)
def test_forced_tokens_are_drafted_unless_the_drafter_goes_on_from_them(drafted, expected):
    grammar = OneOf(TWO, vocab_size=4, forced=(1, 2))
    assert KnownTexts().propose([request_of(grammar)], GuardedDrafter(Says(drafted), vocab_size=4), {}) == [expected]


def test_a_drafter_is_not_asked_where_forced_tokens_fill_the_draft():
    grammar, says = OneOf(TWO, vocab_size=4, forced=(1, 2)), Says(Draft((3,)), Draft((2, 2)), Draft((1, 2, 0)))
    requests = [
        request_of(None),
        request_of(grammar, max_depth=2),
        request_of(None),
        request_of(grammar, max_tokens=1),
        request_of(grammar),
    ]
    drafts = KnownTexts().propose(requests, GuardedDrafter(says, vocab_size=4), {})
    assert drafts == [Draft((3,)), FORCED, Draft((2, 2)), Draft((1,), source="grammar"), Draft((1, 2, 0))]
    assert says.num_asked == 3


def test_a_grammar_that_takes_no_drafts_gets_none():
    grammar, says = OneOf(TWO, vocab_size=4), Says(Draft((3,)), Draft((2, 2)))
    grammar.takes_drafts = False
    requests = [request_of(None), request_of(grammar), request_of(None)]
    drafts = KnownTexts().propose(requests, GuardedDrafter(says, vocab_size=4), {})
    assert drafts == [Draft((3,)), NO_DRAFT, Draft((2, 2))]
    assert says.num_asked == 2


def predicted(token_ids):
    return Draft(token_ids, source="prediction", survival=survival(FIRST_MATCH)[: len(token_ids)])


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ((1, 2, 1, 0), predicted((1, 2, 1, 0))),
        ((1, 2, 1, 1), predicted((1, 2, 1))),
        ((1, 2), Draft((1, 2, 0, 3), source="own")),
        ((2, 1, 0), Draft((1, 2, 0, 3), source="own")),
    ],
    ids=["goes on from the forced tokens", "until it is forbidden", "no further than they", "against them"],
)
def test_a_prediction_replaces_forced_tokens_where_it_goes_on_from_them(prediction, expected):
    grammar, says = OneOf(TWO, vocab_size=4, forced=(1, 2)), Says(Draft((1, 2, 0, 3), source="own"))
    known, request = KnownTexts(), request_of(grammar, prediction=prediction)
    known.start(request.sequence)
    assert known.propose([request], GuardedDrafter(says, vocab_size=4), {}) == [expected]
    assert says.num_asked == (expected.source == "own")


def test_only_where_nothing_is_predicted_the_drafter_is_asked():
    says, known = Says(Draft((3,)), Draft((2, 2))), KnownTexts()
    requests = [
        request_of(None, seq_id=0),
        request_of(None, seq_id=1, prediction=(0, 1, 2)),
        request_of(OneOf(TWO, vocab_size=4), seq_id=2, prediction=(3, 3)),
    ]
    for request in requests:
        known.start(request.sequence)
    drafts = known.propose(requests, GuardedDrafter(says, vocab_size=4), {})
    assert drafts == [Draft((3,)), predicted((0, 1, 2)), NO_DRAFT]
    assert says.num_asked == 2, "all of the last prediction is forbidden, and so is what the drafter says"


def test_a_grammar_that_takes_no_drafts_gets_no_prediction_either():
    grammar, known = OneOf(TWO, vocab_size=4), KnownTexts()
    grammar.takes_drafts = False
    request = request_of(grammar, prediction=(1, 2, 0))
    known.start(request.sequence)
    assert known.propose([request], GuardedDrafter(Says(), vocab_size=4), {}) == [NO_DRAFT]
