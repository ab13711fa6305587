"""Lookup drafts: what is guessed, from which source, how likely, and what is learnt."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafters.base import DraftContext, Drafter, DraftRequest, LearnsFromTarget, TargetInfo, VerifiedRows
from forerun.drafters.lookup import live_text
from forerun.drafters.lookup.drafter import LookupDrafter, as_draft
from forerun.drafters.lookup.guesses import COMPUTED
from forerun.ops.native.lookup import GrownTree
from tests.drafters.texts import TARGET, assert_valid, propose, sequence, start_and_propose


def drafter(target: TargetInfo = TARGET, *, table_bytes: int = 1 << 20, pool_bytes: int = 1 << 20) -> LookupDrafter:
    return LookupDrafter(target, table_bytes=table_bytes, pool_bytes=pool_bytes)


def verified(rows: list[tuple[int, int, list[int]]], *, salt: str | None = None) -> VerifiedRows:
    """Rows of (token before, token, candidates); each candidate has half the probability of the one before it."""
    candidates = np.array([row[2] for row in rows], dtype=np.int32)
    return VerifiedRows(
        token_ids=np.array([row[1] for row in rows]),
        previous_ids=np.array([row[0] for row in rows]),
        candidate_ids=candidates,
        candidate_logits=np.tile(-np.log(2) * np.arange(candidates.shape[1], dtype=np.float32), (len(rows), 1)),
        salts=[(0, len(rows), salt)],
    )


def candidates_after(first: int) -> list[int]:
    """Eight tokens, `first` the likeliest."""
    return [first, *(token_id for token_id in range(40, 48) if token_id != first)][:8]


def test_it_is_a_drafter_that_learns_from_the_target():
    lookup: Drafter = drafter()
    assert isinstance(lookup, LearnsFromTarget)
    assert lookup.num_candidates == 8


@settings(deadline=None, max_examples=40)
@given(
    period=st.lists(st.integers(0, 49), min_size=1, max_size=7, unique=True),
    num_tokens=st.integers(1, 20),
)
def test_a_text_of_period_d_is_drafted_with_period_d(period, num_tokens):
    for start in range(len(period)):
        text = period * (40 // len(period)) + period[:start]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live_text, "FIRST_CAPACITY", 1 << 16)  # so large that the few grams share no slot
            draft = start_and_propose(drafter(), text, max_tokens=num_tokens, max_depth=num_tokens)
        expected = (period * 20)[start : start + num_tokens]
        assert draft.is_chain
        assert draft.token_ids == tuple(expected)[: len(draft)]
        assert len(draft) >= min(num_tokens, 8)
        assert draft.source == "copy"


@settings(deadline=None, max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.permutations(range(8))), max_size=10),
    max_tokens=st.integers(1, 12),
    max_depth=st.integers(1, 12),
)
def test_drafts_are_valid_trees_of_falling_survival(prompt, rows, max_tokens, max_depth):
    lookup = drafter()
    if rows:
        lookup.learn(verified(rows))
    draft = start_and_propose(lookup, prompt, max_tokens=max_tokens, max_depth=max_depth)
    assert_valid(draft, max_tokens=max_tokens, max_depth=max_depth)
    survival = draft.survival or ()
    assert len(survival) == len(draft)
    assert list(survival) == sorted(survival, reverse=True)
    assert all(0 < one <= 1 for one in survival)
    for children in draft.children():
        parent = draft.parent(children[0]) if children else -1
        above = 1.0 if parent < 0 else survival[parent]
        assert sum(survival[child] for child in children) <= above + 1e-12


def test_nothing_known_is_drafted_as_nothing():
    assert len(start_and_propose(drafter(), [1, 2, 3])) == 0


def test_the_table_drafts_where_the_text_has_nothing():
    lookup = drafter()
    lookup.learn(verified([(1, 2, candidates_after(9)), (2, 9, candidates_after(7))]))
    draft = start_and_propose(lookup, [1, 2], max_tokens=8)
    assert draft.source == "recycle"
    assert draft.token_ids[0] == 9
    child = draft.token_ids.index(7)
    assert draft.parent(child) == 0


def test_past_answers_draft_where_the_text_has_nothing():
    lookup, ended = drafter(), sequence([30], [1, 2, 3, 4, 5, 6, 7, 8], seq_id=2)
    lookup.start(ended)
    lookup.stop(ended)
    draft = start_and_propose(lookup, [1, 2, 3, 4])
    assert draft.source == "pool"
    assert draft.token_ids[:2] == (5, 6)


def test_the_longer_match_comes_first():
    lookup, ended = drafter(), sequence([30], [1, 2, 3, 4, 5, 6, 7, 8], seq_id=2)
    lookup.start(ended)
    lookup.stop(ended)
    own = [4, 20, 21, 1, 2, 3, 4]
    assert start_and_propose(lookup, own).token_ids[0] == 5  # four tokens in a past answer, one in the own text
    own = [9, 1, 2, 3, 4, 20, 21, 9, 1, 2, 3, 4]
    assert start_and_propose(lookup, own).token_ids[0] == 20  # five in the own text


def test_salts_share_neither_answers_nor_candidates():
    lookup, ended = drafter(), sequence([30], [1, 2, 3, 4, 5, 6, 7, 8], seq_id=2, salt="theirs")
    lookup.start(ended)
    lookup.learn(verified([(3, 4, candidates_after(9))], salt="theirs"))
    lookup.stop(ended)
    for salt in (None, "mine"):
        one = sequence([1, 2, 3, 4], seq_id=3, salt=salt)
        lookup.start(one)
        assert len(propose(lookup, one)) == 0
    theirs = sequence([1, 2, 3, 4], seq_id=4, salt="theirs")
    lookup.start(theirs)
    assert set(propose(lookup, theirs).token_ids) >= {5, 9}


def test_sequences_do_not_see_each_other_while_they_run():
    lookup, other = drafter(), sequence([1, 2, 3, 4, 5, 6], seq_id=2)
    lookup.start(other)
    assert len(start_and_propose(lookup, [1, 2, 3, 4])) == 0


def test_stopped_sequence_may_start_again_and_an_unknown_one_may_stop():
    lookup, one = drafter(), sequence([1, 2, 1])
    lookup.stop(one)
    for _ in range(2):
        lookup.start(one)
        assert propose(lookup, one).token_ids[0] == 2
        lookup.stop(one)


@pytest.mark.parametrize(("table_bytes", "pool_bytes"), [(0, 1 << 20), (1 << 20, 0), (0, 0)])
def test_a_budget_of_zero_keeps_nothing_and_copies_stay(table_bytes, pool_bytes):
    lookup = drafter(table_bytes=table_bytes, pool_bytes=pool_bytes)
    assert (lookup.num_candidates == 0) == (table_bytes == 0)
    ended = sequence([30], list(range(1, 30)), seq_id=2)
    lookup.start(ended)
    lookup.learn(verified([(1, 2, candidates_after(9))]))
    lookup.stop(ended)
    assert start_and_propose(lookup, [1, 2, 1]).token_ids[0] == 2
    assert lookup.table.num_bytes <= table_bytes
    assert lookup.past_answers.num_bytes <= pool_bytes


def test_ids_at_the_border_of_a_huge_vocabulary_are_drafted():
    last = 2**31 - 1
    lookup = drafter(TargetInfo(vocab_size=2**31, max_model_len=4096, num_speculative_tokens=8))
    assert start_and_propose(lookup, [last, 0, last, 0, last], max_tokens=3).token_ids[:3] == (0, last, 0)


def test_a_text_far_longer_than_its_first_index_is_copied_from_its_beginning():
    lookup, growing = (
        drafter(TargetInfo(vocab_size=10_000, max_model_len=4096, num_speculative_tokens=8)),
        sequence([9]),
    )
    lookup.start(growing)
    for token_id in range(100, 3100):
        growing.output_ids.append(token_id)
        if token_id % 7 == 0:
            propose(lookup, growing)
    growing.output_ids += [100, 101, 102]
    assert propose(lookup, growing, max_tokens=2).token_ids == (103, 104)


def run_text(lookup: LookupDrafter, text: list[int], *, asked: bool) -> None:
    """Feed a text two tokens a step, with rows as the target would leave them; `asked`: with drafts in each step."""
    growing = sequence(text[:2])
    lookup.start(growing)
    for at in range(2, len(text) - 1, 2):
        growing.output_ids += text[at : at + 2]
        lookup.learn(verified([(text[at - 1], text[at], candidates_after(text[at + 1]))]))
        if asked:
            lookup.propose(DraftContext(requests=[DraftRequest(growing, 8, 8)]))
    lookup.propose(DraftContext(requests=[]))


@settings(deadline=None, max_examples=30)
@given(text=st.lists(st.integers(0, 5), min_size=6, max_size=80))
def test_labels_are_the_same_whether_drafts_were_asked_for_or_not(text):
    always, never = drafter(), drafter()
    run_text(always, text, asked=True)
    run_text(never, text, asked=False)
    assert always.rates.counts.tolist() == never.rates.counts.tolist()


def test_a_token_is_scored_with_what_was_known_before_it_was_verified():
    lookup, one = drafter(), sequence([1, 2])
    lookup.start(one)
    before = lookup.rates.counts.copy()
    one.output_ids.append(3)
    lookup.learn(verified([(1, 2, candidates_after(3))]))  # the row that led to the token 3
    propose(lookup, one)
    assert (lookup.rates.counts == before).all(), "no guess was possible before the row was learnt"


def test_rows_of_rejected_drafts_teach():
    lookup, one = drafter(), sequence([1, 2])
    lookup.start(one)
    # the draft was 8, the target's own token 3; what follows 8 was learnt nevertheless
    one.output_ids += [3]
    lookup.learn(verified([(1, 2, candidates_after(3)), (2, 8, candidates_after(5))]))
    one.output_ids += [2, 8]
    assert propose(lookup, one).token_ids[0] == 5


def test_guesses_that_keep_failing_are_drafted_no_more():
    source = random.Random(0)
    lookup, noise = drafter(), sequence([source.randrange(4) for _ in range(8)])
    lookup.start(noise)
    first = propose(lookup, noise, max_tokens=16)
    for _ in range(4000):
        noise.output_ids.append(source.randrange(50))
        propose(lookup, noise, max_tokens=1)
    later = propose(lookup, noise, max_tokens=16)
    assert sum(later.survival or ()) < 0.3 < sum(first.survival or ())


def test_survival_is_calibrated_on_a_synthetic_source():
    """A Markov source of which the table learns the true probabilities: drafted nodes stand as often as they say."""
    source = random.Random(1)
    following = {token_id: source.sample(range(50), 8) for token_id in range(50)}
    weights = [0.5**rank for rank in range(8)]
    lookup, text = drafter(), sequence([0, 1])
    lookup.start(text)
    expected: Counter[int] = Counter()
    stood: Counter[int] = Counter()
    for step in range(3000):
        last = text.tokens_from(len(text) - 2)
        draft = propose(lookup, text, max_tokens=4, max_depth=1)
        (token_id,) = source.choices(following[last[1]], weights)
        text.output_ids.append(token_id)
        lookup.learn(verified([(last[0], last[1], following[last[1]])]))
        if step > 500:
            for node, chance in enumerate(draft.survival or ()):
                expected[node] += chance
                stood[node] += draft.token_ids[node] == token_id
    for node in range(2):
        assert stood[node] == pytest.approx(expected[node], rel=0.1)


def test_a_draft_of_several_sources_names_that_of_each_node():
    tree = GrownTree((5, 6, 7), (-1, -1, 0), (0.9, 0.5, 0.4), (0, COMPUTED, COMPUTED))
    draft = as_draft(tree, "trained head")
    assert (draft.source, draft.sources) == ("copy", ("copy", "trained head", "trained head"))
    assert as_draft(GrownTree((5, 6), (-1, 0), (0.9, 0.5), (COMPUTED, COMPUTED)), "trained head").sources is None
