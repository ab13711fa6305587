"""The verdict on differences between two greedy texts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun.core.outputs import CompletionOutput, Logprob, RequestOutput
from forerun.core.sampling_params import SamplingParams
from forerun.proof.greedy import TIE_GAP, check_greedy, compare, is_near_tie
from forerun.proof.report import Verdict
from tests.contract.drafters import CASES
from tests.engines import native_target, tiny_llm, tiny_target
from tests.foreign import few_tokens
from tests.native import needs_kernels


def output(token_ids, second_best=None, gap=1.0):
    """A finished request; `second_best` at the last token lies `gap` below the token taken."""
    logprobs = [{t: Logprob(-0.1, 1, str(t)), 90 + i: Logprob(-3.0, 2, "other")} for i, t in enumerate(token_ids)]
    if second_best is not None:
        logprobs[-1] = {token_ids[-1]: Logprob(-0.1, 1, "best"), second_best: Logprob(-0.1 - gap, 2, "second")}
    completion = CompletionOutput(0, "", token_ids, logprobs=logprobs, finish_reason="length")
    return RequestOutput(request_id="0", prompt="p", prompt_token_ids=[1], outputs=[completion], finished=True)


def test_equal_texts_and_logprobs_are_bit_identical():
    assert compare(output([1, 2, 3]), output([1, 2, 3]), tie_gap=1e-3).verdict is Verdict.BIT_IDENTICAL


def test_equal_texts_of_other_logprobs_are_equal():
    plain, speculated = output([1, 2, 3]), output([1, 2, 3])
    speculated.outputs[0].logprobs[1][2] = Logprob(-0.1000001, 1, "2")
    finding = compare(plain, speculated, tie_gap=1e-3)
    assert (finding.verdict, finding.position) == (Verdict.EQUAL, None)


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


def test_where_bits_are_promised_a_near_tie_is_a_bug():
    finding = compare(output([1, 2], second_best=7, gap=0.0), output([1, 7]), tie_gap=None)
    assert (finding.verdict, finding.position) == (Verdict.BUG, 1)


def test_where_bits_are_promised_other_logprobs_are_a_bug():
    plain, speculated = output([1, 2, 3]), output([1, 2, 3])
    speculated.outputs[0].logprobs[1][2] = Logprob(-0.1000001, 1, "2")
    finding = compare(plain, speculated, tie_gap=None)
    assert (finding.verdict, finding.position) == (Verdict.BUG, 1)


@needs_kernels
@pytest.mark.parametrize("weights", [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, "int8")])
def test_on_the_kernels_greedy_text_is_bit_identical(weights):
    llm = tiny_llm(CASES["suffix-tree"], target=native_target(*weights))
    assert llm.is_batch_invariant
    findings = check_greedy(llm, ["to be or not to be or not", "a b a b a b"], max_tokens=30, progress=print)
    assert {finding.verdict for finding in findings} == {Verdict.BIT_IDENTICAL}
    assert sum(finding.num_draft_tokens for finding in findings) > 0


def test_a_drafter_that_remembers_answers_meets_none_of_the_plain_pass():
    """Else all its drafts were right, and no rejection tested."""
    prompts = ["a b a b a b", "to be or not to be or not"]

    def llm():
        return tiny_llm(CASES["suffix-tree"], target=replace(tiny_target(), tokenizer=few_tokens()), verifies_all=True)

    findings = check_greedy(llm(), prompts, max_tokens=30, progress=print)
    fresh = llm().generate(prompts, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    counts = [(one.num_draft_tokens, one.num_accepted_tokens) for one in findings]
    assert counts == [(one.speculation.num_draft_tokens, one.speculation.num_accepted_tokens) for one in fresh]
    assert sum(drafted - accepted for drafted, accepted in counts) > 0


@pytest.mark.parametrize("wrong_from", [None, 6])
def test_what_follows_a_tie_is_compared_with_plain_decoding_of_the_same_text(monkeypatch, wrong_from):
    llm = tiny_llm(CASES["ngram"], target=replace(tiny_target(), tokenizer=few_tokens()))
    monkeypatch.setitem(TIE_GAP, torch.float32, 1000.0)  # whatever is second is a tie
    generate, asked = llm.generate, []

    def generating(texts, sampling, **options):
        outputs = generate(texts, sampling, **options)
        asked.append(outputs)
        if len(asked) == 2:  # with speculation: at the third token the second best, and what the target says to that
            (plain,), (speculated,) = asked
            prompt, ids = plain.prompt_token_ids, plain.outputs[0].token_ids[:2]
            (second,) = {*plain.outputs[0].logprobs[2]} - {plain.outputs[0].token_ids[2]}
            rest = replace(sampling, max_tokens=sampling.max_tokens - 3, speculation="off")
            (after,) = generate({"prompt_token_ids": [*prompt, *ids, second]}, rest, use_tqdm=False)
            text = [*ids, second, *after.outputs[0].token_ids]
            if wrong_from is not None:
                text[wrong_from:] = [3] * (len(text) - wrong_from)
            speculated.outputs[0].token_ids[:] = text
        return outputs

    monkeypatch.setattr(llm, "generate", generating)
    (finding,) = check_greedy(llm, ["to be or not"], max_tokens=20, progress=print)
    expected = (Verdict.TIE, 2) if wrong_from is None else (Verdict.BUG, wrong_from)
    assert (finding.verdict, finding.position) == expected


@pytest.mark.parametrize("logprob", [-0.2, float("nan")])
def test_equal_texts_of_logprobs_that_rounding_cannot_explain_are_a_bug(logprob):
    plain, speculated = output([1, 2, 3]), output([1, 2, 3])
    speculated.outputs[0].logprobs[1][2] = Logprob(logprob, 1, "2")
    finding = compare(plain, speculated, tie_gap=1e-3)
    assert (finding.verdict, finding.position) == (Verdict.BUG, 1)


@needs_kernels
def test_on_the_kernels_rounding_that_depends_on_the_batch_is_a_bug(monkeypatch):
    llm = tiny_llm(CASES["suffix-tree"], target=native_target())
    exact = llm.executor.model.forward

    def rounded(batch, attend):
        result = exact(batch, attend)
        return replace(result, logits=result.logits * (1 + 1e-6 * (len(result.logits) > 1)))

    monkeypatch.setattr(llm.executor.model, "forward", rounded)
    findings = check_greedy(llm, ["a b a b a b"], max_tokens=30, progress=print)
    assert [finding.verdict for finding in findings] == [Verdict.BUG]


@pytest.mark.parametrize(("gap", "is_tie"), [(1e-4, True), (0.1, False)])
def test_near_ties_are_judged_by_the_text_alone(monkeypatch, gap, is_tie):
    llm = tiny_llm()
    decoder = llm.executor.model
    logits = torch.zeros(decoder.vocab_size)
    logits[7], logits[8] = 5.0, 5.0 - gap
    monkeypatch.setattr(decoder, "logits", lambda hidden: logits.repeat(len(hidden), 1))
    assert is_near_tie(llm, [1, 2, 3], 7, 8) is is_tie
    assert not is_near_tie(llm, [1, 2, 3], 7, 9)


@needs_kernels
def test_on_the_kernels_nothing_is_a_near_tie(monkeypatch):
    llm = tiny_llm(target=native_target())
    monkeypatch.setattr(llm, "generate", None)
    assert not is_near_tie(llm, [1, 2, 3], 7, 8)


@pytest.mark.parametrize("differs", [False, True])
def test_on_a_device_texts_are_compared_that_are_written_without_log_probabilities_too(monkeypatch, differs):
    """As users ask for them: those steps may be CUDA graphs, and are read late."""
    llm = tiny_llm(CASES["ngram"], target=replace(tiny_target(), tokenizer=few_tokens()), device_step=True)
    generate, asked = llm.generate, []

    def generating(texts, sampling, **options):
        outputs = generate(texts, sampling, **options)
        asked.append((sampling.speculation, sampling.logprobs))
        if differs and sampling.logprobs is None:
            outputs[1].outputs[0].token_ids[3] += 1
        return outputs

    monkeypatch.setattr(llm, "generate", generating)
    findings = check_greedy(llm, ["to be or not", "a b a b"], max_tokens=8, progress=print)
    assert asked == [("off", 2), (None, 2), (None, None)]
    verdicts = [(finding.verdict, finding.position) for finding in findings]
    same = (Verdict.BIT_IDENTICAL, None)
    assert verdicts == [same, (Verdict.BUG, 3) if differs else same]
