"""Matching walks down the draft along the target's own samples."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.draft import Draft
from forerun.ops.sampling import target_tokens
from forerun.verify.base import Verdict, VerifyRequest
from forerun.verify.matching import MatchingConfig
from tests.verify.judged import VOCAB_SIZE, judged_of, random_rows, rows_preferring

VERIFIER = MatchingConfig().build(4)


@pytest.mark.parametrize(
    ("draft", "preferred", "expected"),
    [
        (Draft(), (3,), Verdict((), 3)),
        (Draft((3, 4)), (3, 4, 5), Verdict((0, 1), 5)),
        (Draft((3, 4)), (3, 6, 5), Verdict((0,), 6)),
        (Draft((3, 4)), (2, 4, 5), Verdict((), 2)),
        (Draft((1, 3, 7, 4), (-1, -1, 0, 1)), (3, 0, 4, 0, 6), Verdict((1, 3), 6)),
        (Draft((3, 3, 4), (-1, -1, 1)), (3, 5, 4, 0), Verdict((0,), 5)),
    ],
    ids=["empty", "all", "some", "none", "second branch", "the first of equal siblings"],
)
@pytest.mark.parametrize("bias", [None, {0: -1.0}], ids=["plain", "with rules"])
def test_greedy_accepts_the_argmax_path(draft, preferred, expected, bias):
    judged = judged_of(draft, temperature=0, logit_bias=bias)
    assert VERIFIER.verify(rows_preferring(*preferred), [judged]) == [expected]


def test_each_sequence_reads_its_own_rows():
    logits = rows_preferring(0, 1, 2, 3)
    sequences = [judged_of(Draft((1,)), first_row=1, temperature=0), judged_of(first_row=3, temperature=0)]
    assert [v.token_id for v in VERIFIER.verify(logits, sequences)] == [2, 3]


def test_greedy_ties_go_to_the_lowest_token_id():
    assert VERIFIER.verify(torch.zeros(1, VOCAB_SIZE), [judged_of(temperature=0)]) == [Verdict((), 0)]


def decode_plainly(model, num_tokens, *, seed, **params):
    output_ids = []
    for _ in range(num_tokens):
        rules = judged_of(**params).rules
        row = model(tuple(output_ids))
        output_ids += target_tokens(rules, row, output_ids, seed=seed, position=1 + len(output_ids), count=1)
    return output_ids


def decode_with_drafts(model, num_tokens, drafts, *, seed, **params):
    output_ids, rules = [], judged_of(**params).rules
    while len(output_ids) < num_tokens:
        draft = next(drafts)
        paths = [[draft.token_ids[n] for n in draft.path(node)] for node in range(-1, len(draft))]
        logits = torch.stack([model((*output_ids, *path)) for path in paths])
        judged = VerifyRequest(
            draft=draft, first_row=0, rules=rules, seed=seed, position=1 + len(output_ids), output_ids=output_ids
        )
        verdict = VERIFIER.verify(logits, [judged])[0]
        output_ids += [draft.token_ids[n] for n in verdict.accepted]
        output_ids.append(verdict.token_id)
    return output_ids[:num_tokens]


def toy_model(path):
    return random_rows(1, seed=hash(path[-2:]) % 1000)[0] * 2


def a_draft(token_ids, picks):
    parents = [pick % (node + 1) - 1 for node, pick in enumerate(picks[: len(token_ids)])]
    return Draft(tuple(token_ids[: len(parents)]), tuple(parents))


drafts_of_any_kind = st.builds(
    a_draft,
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5),
    st.lists(st.integers(0, 100), max_size=5),
)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"temperature": 1.2, "top_k": 4, "min_tokens": 5, "stop_ids": frozenset({1, 2})},
    ],
    ids=["plain", "greedy penalised", "penalised nucleus", "top-k with min_tokens"],
)
@given(drafts=st.lists(drafts_of_any_kind, min_size=9, max_size=9), seed=st.integers(0, 10))
@settings(deadline=None, max_examples=25)
def test_the_text_of_a_seed_is_the_same_whatever_was_drafted(params, drafts, seed):
    expected = decode_plainly(toy_model, 9, seed=seed, **params)
    assert decode_with_drafts(toy_model, 9, iter(drafts), seed=seed, **params) == expected


def test_only_nodes_on_the_walked_path_are_shaped():
    seen = []

    def note(output_ids, logits):
        seen.append(output_ids)
        return logits

    draft = Draft((3, 1, 4, 5), (-1, -1, 0, 2))
    VERIFIER.verify(rows_preferring(3, 4, 0, 7, 0), [judged_of(draft, temperature=0, logits_processors=[note])])
    assert seen == [[], [3], [3, 4]]


def test_min_tokens_stop_forbidding_along_the_draft():
    judged = judged_of(Draft((3, 4)), temperature=0, min_tokens=2, stop_ids=frozenset({7}))
    logits = rows_preferring(7, 7, 7)
    logits[0, 3] = logits[1, 4] = 3.0
    assert VERIFIER.verify(logits, [judged]) == [Verdict((0, 1), 7)]


def test_logits_are_not_changed():
    logits = random_rows(4)
    before = logits.clone()
    VERIFIER.verify(logits, [judged_of(Draft((1,)), repetition_penalty=2.0), judged_of(first_row=2, temperature=0)])
    assert torch.equal(logits, before)
