"""Every lossless verifier, proved on tiny vocabularies; and the proof convicts a biased one."""

import itertools

import pytest

from forerun.core.draft import Draft
from forerun.errors import RequestError
from forerun.verify.base import Verdict
from forerun.verify.block import traverse
from forerun.verify.matching import match
from forerun.verify.reference import judge_by_the_book
from forerun.verify.rejection import acceptance_ratio, reject
from tests.verify.exact import largest_error, mean_accepted, outcomes, random_model, reversed_model, sampled_drafts

VOCAB_SIZE = 3
SHAPES = {
    "nothing": (),
    "chain": (-1, 0, 1),
    "siblings": (-1, -1, -1),
    "two branches": (-1, -1, 0, 1),
    "deep first": (-1, 0, -1, 0),
    "deep second": (-1, -1, 1, 1),
}
JUDGES = {
    "matching": lambda draft, target, chance: match(draft, target),
    "reference": judge_by_the_book,
    "rejection": reject,
    "block": traverse,
}
TARGET = random_model("target", vocab_size=VOCAB_SIZE)
DRAFTERS = {"random": random_model("draft", vocab_size=VOCAB_SIZE), "adversary": reversed_model(TARGET)}


def depth(shape):
    return max(Draft((0,) * len(shape), shape).depths(), default=0)


@pytest.mark.parametrize("replacement", [True, False], ids=["with replacement", "without replacement"])
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("judge", JUDGES.values(), ids=JUDGES)
def test_sampled_drafts_leave_the_targets_distribution_exactly(judge, shape, drafter, replacement):
    drafts = list(sampled_drafts(shape, drafter, vocab_size=VOCAB_SIZE, replacement=replacement))
    assert largest_error(judge, drafts, TARGET, length=depth(shape) + 1) < 1e-9


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("judge", JUDGES.values(), ids=JUDGES)
def test_every_certain_draft_leaves_the_targets_distribution_exactly(judge, shape):
    for token_ids in itertools.product(range(VOCAB_SIZE), repeat=len(shape)):
        certain = [(Draft(token_ids, shape), 1.0)]
        assert largest_error(judge, certain, TARGET, length=depth(shape) + 1) < 1e-9, token_ids


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("judge", [JUDGES["rejection"], JUDGES["block"]], ids=["rejection", "block"])
def test_a_token_behind_which_the_rules_fail_is_as_likely_as_the_target_has_it(judge, shape):
    def target(path):
        if path[-1:] == (1,):
            raise RequestError("the rules fail")
        return TARGET(path)

    drafts = list(sampled_drafts(shape, DRAFTERS["random"], vocab_size=VOCAB_SIZE, replacement=True))
    found = [0.0] * VOCAB_SIZE
    for draft, drafted in drafts:
        for verdict, weight in outcomes(judge, draft, target):
            tokens = (*(draft.token_ids[node] for node in verdict.accepted), verdict.token_id)
            assert 1 not in tokens[:-1]  # nothing is decided behind it
            found[tokens[0]] += drafted * weight
    assert found == pytest.approx(TARGET(()), abs=1e-9)


@pytest.mark.parametrize("judge", [JUDGES["rejection"], JUDGES["block"]], ids=["rejection", "block"])
def test_tokens_the_target_forbids_never_come_out(judge):
    def target(path):
        return [0.0, 0.25, 0.75]

    drafts = list(sampled_drafts((-1, -1, 0), DRAFTERS["random"], vocab_size=VOCAB_SIZE, replacement=True))
    assert largest_error(judge, drafts, target, length=3) < 1e-9


@pytest.mark.parametrize("judge", [JUDGES["rejection"], JUDGES["block"]], ids=["rejection", "block"])
def test_a_drafter_equal_to_the_target_is_always_accepted(judge):
    drafts = list(sampled_drafts((-1, 0, 1), TARGET, vocab_size=VOCAB_SIZE, replacement=True))
    assert mean_accepted(judge, drafts, TARGET) == pytest.approx(3.0, abs=1e-9)


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_on_chains_block_accepts_more_than_rejection_and_rejection_more_than_matching(drafter):
    drafts = list(sampled_drafts((-1, 0, 1), drafter, vocab_size=VOCAB_SIZE, replacement=True))
    matching, rejection, block = (mean_accepted(JUDGES[j], drafts, TARGET) for j in ("matching", "rejection", "block"))
    assert block > rejection + 1e-3
    assert rejection > matching + 1e-3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_on_trees_traversal_accepts_no_less_than_rejection(shape):
    drafts = list(sampled_drafts(shape, DRAFTERS["random"], vocab_size=VOCAB_SIZE, replacement=False))
    assert mean_accepted(traverse, drafts, TARGET) >= mean_accepted(reject, drafts, TARGET) - 1e-12


def test_certain_chains_are_accepted_equally_by_all():
    certain = [(Draft((0, 1, 2)), 1.0)]
    lengths = [mean_accepted(judge, certain, TARGET) for judge in JUDGES.values()]
    assert lengths == pytest.approx([lengths[0]] * len(lengths), abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rejection_gives_each_verdict_as_often_as_the_reference(shape):
    for draft, _ in sampled_drafts(shape, DRAFTERS["random"], vocab_size=VOCAB_SIZE, replacement=False):
        assert verdicts_of(reject, draft) == pytest.approx(verdicts_of(judge_by_the_book, draft), abs=1e-12)


def test_on_chains_traversal_is_block_verification():
    for draft, _ in sampled_drafts((-1, 0, 1), DRAFTERS["random"], vocab_size=VOCAB_SIZE, replacement=True):
        assert lengths_of(traverse, draft) == pytest.approx(block_lengths(draft), abs=1e-12)


def test_the_proof_convicts_a_verifier_that_recovers_from_the_unchanged_target():
    def biased(draft, target, chance):
        left = target.probs(-1)
        if chance.accepts(0, acceptance_ratio(left, draft, 0)):
            return Verdict((0,), chance.token(target.probs(0)))
        return Verdict((), chance.token(left))

    drafts = list(sampled_drafts((-1,), DRAFTERS["random"], vocab_size=VOCAB_SIZE, replacement=True))
    assert largest_error(biased, drafts, TARGET, length=2) > 1e-3


def verdicts_of(judge, draft):
    found = {}
    for verdict, weight in outcomes(judge, draft, TARGET):
        key = (verdict.accepted, verdict.token_id)
        found[key] = found.get(key, 0.0) + weight
    return found


def lengths_of(judge, draft):
    found = [0.0] * (len(draft) + 1)
    for verdict, weight in outcomes(judge, draft, TARGET):
        found[len(verdict.accepted)] += weight
    return found


def block_lengths(draft):
    """Chance of each accepted length by the formulas of arXiv 2403.10444, algorithm 2."""
    reach = 1.0
    stands = [1.0]  # chance that the first i tokens pass their own test
    for node in range(len(draft)):
        wanted, drafted = TARGET(draft.token_ids[:node]), draft.probs[node].tolist()
        token_id = draft.token_ids[node]
        reach = min(reach * wanted[token_id] / drafted[token_id], 1.0)
        if node + 1 == len(draft):
            stands.append(reach)
            break
        after, drafted_after = TARGET(draft.token_ids[: node + 1]), draft.probs[node + 1].tolist()
        mass = sum(max(reach * t - d, 0.0) for t, d in zip(after, drafted_after, strict=True))
        stands.append(mass / (mass + 1.0 - reach))
    lengths, not_longer = [0.0] * len(stands), 1.0
    for length in reversed(range(len(stands))):
        lengths[length] = not_longer * stands[length]
        not_longer *= 1.0 - stands[length]
    return lengths
