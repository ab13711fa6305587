"""The arithmetic of the quality table."""

from __future__ import annotations

import math

import pytest

from benchmarks.quality import ANSWER, QUESTION, Measured, common_prefix, compare, is_right, read_questions
from forerun import SamplingParams
from tests.engines import tiny_llm

RIGHT = [True, False, True, True]
REFERENCE = Measured(losses=[1.0, 2.0], right=RIGHT, texts=[[1, 2, 3], [4, 5]], agreed=5, num_judged=5)


def test_perplexity_is_of_the_mean_loss():
    assert compare("bf16", "", REFERENCE, REFERENCE).perplexity == pytest.approx(math.exp(1.5))


def test_a_loss_that_is_higher_everywhere_by_the_same_has_no_error():
    found = Measured(losses=[1.1, 2.1], right=RIGHT, texts=REFERENCE.texts, agreed=5, num_judged=5)
    row = compare("int8", "", found, REFERENCE)
    assert row.perplexity_ratio == pytest.approx(math.exp(0.1))
    assert row.perplexity_ratio_error == pytest.approx(0.0)


def test_answers_are_compared_one_by_one():
    found = Measured(losses=[1.0, 2.0], right=RIGHT, texts=[[1, 2, 9], [4, 5]], agreed=4, num_judged=5)
    row = compare("int8", "", found, REFERENCE)
    assert (row.num_identical, row.median_common_prefix, row.agreement) == (1, 2, 0.8)


def test_choices_are_counted_and_compared_one_by_one():
    found = Measured(losses=[1.0, 2.0], right=[False, True, True, True], texts=REFERENCE.texts, agreed=5, num_judged=5)
    row = compare("int8", "", found, REFERENCE)
    assert (row.accuracy, row.num_changed) == (0.75, 2)


def test_the_first_answer_of_a_question_alone_goes_on_where_the_question_ends():
    ids = list(range(60 * (QUESTION + ANSWER)))
    questions = read_questions(ids, 20)
    assert questions == read_questions(ids, 20)
    for right, *wrong in questions:
        assert right == list(range(right[0], right[0] + QUESTION + ANSWER))
        assert len(wrong) == 3
        for text in wrong:
            assert text[:QUESTION] == right[:QUESTION]
            assert text[QUESTION] != right[QUESTION]


def test_a_text_that_is_too_short_for_the_questions_is_refused():
    with pytest.raises(SystemExit, match="--num-questions: got 20; the text behind --num-tokens has 9 pieces"):
        read_questions([1] * 9 * (QUESTION + ANSWER), 20)


def test_the_likeliest_answer_is_chosen():
    llm = tiny_llm()
    question = [(7 * i) % 30 + 3 for i in range(QUESTION)]
    (written,) = llm.generate(
        [question], SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True), use_tqdm=False
    )
    own, other = question + written.outputs[0].token_ids, question + [(11 * i) % 30 + 3 for i in range(ANSWER)]
    assert is_right(llm, [own, other])
    assert not is_right(llm, [other, own])


@pytest.mark.parametrize(("text", "other", "length"), [([1, 2], [1, 2, 3], 2), ([1], [2], 0), ([], [1], 0)])
def test_common_prefix_ends_where_texts_part_or_one_ends(text, other, length):
    assert common_prefix(text, other) == length
