"""The arithmetic of the quality table."""

from __future__ import annotations

import math

import pytest

from benchmarks.quality import Choice, Measured, answer, common_prefix, compare
from forerun import SamplingParams
from tests.engines import tiny_llm

RIGHT = [True, False, True, True]
KINDS = ["sums", "sums", "names", "names"]
REFERENCE = Measured(losses=[1.0, 2.0], right=RIGHT, texts=[[1, 2, 3], [4, 5]], agreed=5, num_judged=5)


def test_perplexity_is_of_the_mean_loss():
    assert compare("bf16", "", REFERENCE, REFERENCE, KINDS).perplexity == pytest.approx(math.exp(1.5))


def test_a_loss_that_is_higher_everywhere_by_the_same_has_no_error():
    found = Measured(losses=[1.1, 2.1], right=RIGHT, texts=REFERENCE.texts, agreed=5, num_judged=5)
    row = compare("int8", "", found, REFERENCE, KINDS)
    assert row.perplexity_ratio == pytest.approx(math.exp(0.1))
    assert row.perplexity_ratio_error == pytest.approx(0.0)


def test_answers_are_compared_one_by_one():
    found = Measured(losses=[1.0, 2.0], right=RIGHT, texts=[[1, 2, 9], [4, 5]], agreed=4, num_judged=5)
    row = compare("int8", "", found, REFERENCE, KINDS)
    assert (row.num_identical, row.median_common_prefix, row.agreement) == (1, 2, 0.8)


def test_choices_are_counted_and_compared_one_by_one():
    found = Measured(losses=[1.0, 2.0], right=[False, True, True, True], texts=REFERENCE.texts, agreed=5, num_judged=5)
    row = compare("int8", "", found, REFERENCE, KINDS)
    assert (row.accuracy, row.num_changed) == (0.75, 2)
    assert row.accuracy_by_kind == {"sums": 0.5, "names": 1.0}


def test_the_likeliest_answer_is_chosen_whichever_questions_are_beside_it():
    llm = tiny_llm()
    question = [(7 * i) % 30 + 3 for i in range(20)]
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (written,) = llm.generate([question], sampling, use_tqdm=False)
    own, other = list(written.outputs[0].token_ids), [(11 * i) % 30 + 3 for i in range(6)]
    own_first, other_first = (
        Choice(kind="", question=question, answers=answers, num_bytes=[10, 10])
        for answers in ([own, other], [other, own])
    )
    assert answer(llm, [own_first, other_first, own_first]) == [True, False, True]


def test_an_answer_is_as_likely_as_its_bytes_are():
    llm = tiny_llm()
    question, answers = [5, 6, 7], [[8, 9], [8, 9]]
    longer_first, longer_last = (
        Choice(kind="", question=question, answers=answers, num_bytes=sizes) for sizes in ([9, 4], [4, 9])
    )
    assert answer(llm, [longer_first, longer_last]) == [True, False]


@pytest.mark.parametrize(("text", "other", "length"), [([1, 2], [1, 2, 3], 2), ([1], [2], 0), ([], [1], 0)])
def test_common_prefix_ends_where_texts_part_or_one_ends(text, other, length):
    assert common_prefix(text, other) == length
