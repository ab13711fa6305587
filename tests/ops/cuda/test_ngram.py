"""The device's n-gram drafts are those of `NgramDrafter`, by formula and on the kernels."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafters import ngram as drafters
from forerun.drafters.confidence import confident_length
from forerun.ops.cuda import ngram
from forerun.ops.cuda.table import DeviceTable
from tests.cuda import DEVICE, assert_equal_records, copy_of, ints
from tests.drafters.texts import TARGET, start_and_propose

from forerun.ops.cuda.kernels import ngram as kernels  # isort: skip - tests.cuda comes first

MOST_DRAFTED = 6
DRAFT_LENGTHS = [min(2 + match // 2, MOST_DRAFTED) for match in range(ngram.LONGEST_MATCH)]
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def table_of(texts, *, max_length=80):
    table = DeviceTable.empty(len(texts), max_length=max_length, num_blocks=1, most_drafted=MOST_DRAFTED, device=DEVICE)
    for slot, text in enumerate(texts):
        table.tokens[slot, : len(text)] = ints(*text)
        table.lengths[slot] = len(text)
    return table


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(TEXTS, st.integers(0, MOST_DRAFTED)), min_size=1, max_size=3), st.data())
def test_kernels_draft_what_the_formula_drafts(sequences, data):
    longest = data.draw(st.integers(1, 5))
    lengths = {"shortest": data.draw(st.integers(1, longest)), "longest": longest}
    table = table_of([text for text, _ in sequences])
    found = copy_of(table)
    slots = ints(*(data.draw(st.sampled_from([slot, slot, -1])) for slot in range(len(sequences))))
    limits = ints(*(limit for _, limit in sequences))
    ngram.propose(table, slots, limits, ints(*DRAFT_LENGTHS), **lengths)
    kernels.propose(found, slots, limits, ints(*DRAFT_LENGTHS), **lengths)
    assert_equal_records(found, table)


@settings(max_examples=8, deadline=None)
@given(TEXTS, st.integers(1, 4), st.integers(0, 3), st.sampled_from([0.0, 0.3]))
def test_drafts_are_those_of_the_drafter(text, shortest, more, threshold):
    config = drafters.NgramConfig(
        prompt_lookup_min=shortest, prompt_lookup_max=shortest + more, draft_confidence_threshold=threshold
    )
    expected = start_and_propose(config.build(TARGET), text, max_tokens=MOST_DRAFTED, max_depth=MOST_DRAFTED)
    most = TARGET.num_speculative_tokens
    draft_lengths = [
        confident_length(match, threshold=threshold, most=most) for match in range(1, ngram.LONGEST_MATCH + 1)
    ]
    for module in (ngram, kernels):
        table = table_of([text])
        limits = ints(MOST_DRAFTED)
        module.propose(table, ints(0), limits, ints(*draft_lengths), shortest=shortest, longest=shortest + more)
        assert table.draft_tokens[0, : int(table.draft_sizes[0])].tolist() == list(expected.token_ids)


def test_matches_are_counted_as_far_as_the_drafter_counts_them():
    assert ngram.LONGEST_MATCH == drafters.LONGEST_MATCH


def test_a_text_of_many_programs_is_searched_to_its_end(monkeypatch):
    monkeypatch.setattr(kernels, "PLACES_PER_PROGRAM", 16)
    monkeypatch.setattr(kernels, "BLOCK", 8)
    text = [1, 2, 3, 4, 5, 6, 7] + [0] * 45 + [1, 2, 3]
    table = table_of([text])
    kernels.propose(table, ints(0), ints(4), ints(*DRAFT_LENGTHS), shortest=2, longest=3)
    assert table.draft_tokens[0, : int(table.draft_sizes[0])].tolist() == [4, 5, 6]
