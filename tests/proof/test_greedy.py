"""What a difference between two greedy texts is called."""

from __future__ import annotations

import pytest

from forerun.core.outputs import CompletionOutput, Logprob, RequestOutput
from forerun.proof.greedy import compare
from forerun.proof.report import Verdict


def output(token_ids, second_best=None, gap=1.0):
    """A finished request; `second_best` at the last token lies `gap` below the token taken."""
    logprobs = [{t: Logprob(-0.1, 1, str(t)), 90 + i: Logprob(-3.0, 2, "other")} for i, t in enumerate(token_ids)]
    if second_best is not None:
        logprobs[-1] = {token_ids[-1]: Logprob(-0.1, 1, "best"), second_best: Logprob(-0.1 - gap, 2, "second")}
    completion = CompletionOutput(0, "", token_ids, logprobs=logprobs, finish_reason="length")
    return RequestOutput(request_id="0", prompt="p", prompt_token_ids=[1], outputs=[completion], finished=True)


def test_equal_texts_are_equal():
    assert compare(output([1, 2, 3]), output([1, 2, 3]), tie_gap=1e-3).verdict is Verdict.EQUAL


def test_a_near_tie_between_the_two_best_is_a_tie():
    finding = compare(output([1, 2], second_best=7, gap=1e-4), output([1, 7]), tie_gap=1e-3)
    assert (finding.verdict, finding.position) == (Verdict.TIE, 1)
    assert finding.gap == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("plain", "speculated"),
    [
        (output([1, 2], second_best=7, gap=0.1), output([1, 7])),
        (output([1, 2], second_best=7, gap=1e-4), output([1, 8])),
        (output([1, 2, 3]), output([1, 2])),
    ],
    ids=["a wide gap", "neither of the two best", "a missing token"],
)
def test_any_other_difference_is_a_bug(plain, speculated):
    assert compare(plain, speculated, tie_gap=1e-3).verdict is Verdict.BUG
