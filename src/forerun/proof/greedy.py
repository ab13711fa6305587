"""The greedy check: compares text and logprobs with and without drafts, and judges differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from forerun.core.outputs import CompletionOutput, Logprob, RequestOutput
from forerun.core.sampling_params import SamplingParams
from forerun.llm import LLM, Prompt
from forerun.proof.report import GreedyFinding, Verdict

TIE_GAP = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Gaps between logits (in nats) that rounding can reverse when the batch has another shape, by dtype."""


def check_greedy(
    llm: LLM, prompts: Sequence[str], *, max_tokens: int, progress: Callable[[str], None]
) -> list[GreedyFinding]:
    """Decode all prompts without and with speculation, and compare each pair of outputs.

    Prompts become user messages if the model has a chat template. No pass meets a drafter or a prefix cache that has seen the
    answers of another: a drafter that knows them has next to nothing rejected. Where a device keeps the texts, steps whose log
    probabilities are read are not those of other requests, which may be CUDA graphs and are read late: so all are decoded once
    more without.
    """
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=2)

    def decode(salt: str, sampling: SamplingParams) -> list[RequestOutput]:
        return llm.generate([_laid_out(llm, prompt, salt) for prompt in prompts], sampling, use_tqdm=False)

    progress("greedy: plain decoding")
    plain = decode("plain", replace(sampling, speculation="off"))
    progress("greedy: with speculation")
    speculated = decode("speculated", sampling)
    tie_gap = None if llm.is_batch_invariant else TIE_GAP[llm.dtype]
    findings = [compare(a, b, tie_gap=tie_gap) for a, b in zip(plain, speculated, strict=True)]
    findings = [_beyond_ties(llm, *one, sampling) for one in zip(findings, speculated, strict=True)]
    if not llm.has_device_layers:
        return findings
    progress("greedy: with speculation, without log probabilities")
    unread = decode("unread", replace(sampling, logprobs=None))
    findings = [_compare_text(*one, tie_gap=tie_gap) for one in zip(findings, plain, unread, strict=True)]
    return [_beyond_ties(llm, *one, sampling) for one in zip(findings, unread, strict=True)]


def _laid_out(llm: LLM, prompt: str, salt: str) -> Prompt:
    tokenizer = llm.get_tokenizer()
    laid_out: dict[str, Any] = {"prompt": prompt, "cache_salt": salt}
    if tokenizer.has_chat_template:
        laid_out["prompt_token_ids"] = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return laid_out


def _beyond_ties(
    llm: LLM, finding: GreedyFinding, speculated: RequestOutput, sampling: SamplingParams
) -> GreedyFinding:
    """The finding, where the text goes on after a tie of what plain decoding says to it; that of the first tie if there are only ties."""
    got, begin = speculated.outputs[0], 0
    parted = finding
    while parted.verdict is Verdict.TIE and parted.position is not None:
        begin += parted.position + 1
        if begin >= len(got.token_ids):
            break
        (plain,) = llm.generate(
            {"prompt_token_ids": [*(speculated.prompt_token_ids or ()), *got.token_ids[:begin]], "cache_salt": "plain"},
            replace(sampling, max_tokens=(sampling.max_tokens or 0) - begin, speculation="off"),
            use_tqdm=False,
        )
        rest = replace(speculated, outputs=[replace(got, token_ids=got.token_ids[begin:])])
        parted = _compare_text(replace(finding, verdict=Verdict.EQUAL), plain, rest, tie_gap=TIE_GAP[llm.dtype])
    if parted.verdict is Verdict.BUG and parted.position is not None:
        return replace(parted, position=begin + parted.position)
    return finding


def compare(plain: RequestOutput, speculated: RequestOutput, *, tie_gap: float | None) -> GreedyFinding:
    """Judge the two outputs of a prompt, which must have the two best logprobs of each token.

    Where the texts part, a numerical tie needs a speculated token among the target's two best and a gap
    between these of at most `tie_gap`; any other difference is a bug. So are logprobs of equal texts that are
    further apart than that. If `tie_gap` is None nothing is a tie, and any difference of logprobs is a bug.
    """
    expected, got = plain.outputs[0], speculated.outputs[0]
    stats = speculated.speculation
    finding = GreedyFinding(
        prompt=plain.prompt or "",
        num_tokens=len(got.token_ids),
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        verdict=Verdict.BIT_IDENTICAL,
    )
    position = _first_difference(expected.token_ids, got.token_ids)
    if position is not None:
        return _judge_parting(finding, expected, got, position=position, tie_gap=tie_gap)
    position = _first_difference(expected.logprobs or [], got.logprobs or [])
    if position is None:
        return finding
    if tie_gap is not None:
        far = (
            a
            for a, b in enumerate(zip(expected.logprobs or [], got.logprobs or [], strict=True))
            if _are_far(*b, tie_gap)
        )
        position = next(far, None)
    if position is not None:
        return replace(finding, verdict=Verdict.BUG, position=position)
    return replace(finding, verdict=Verdict.EQUAL)


def _are_far(expected: Mapping[int, Logprob], got: Mapping[int, Logprob], tie_gap: float) -> bool:
    """Whether a token's two logprobs differ by more than rounding can make them; a NaN does."""
    return any(
        not abs(one.logprob - got[token_id].logprob) <= tie_gap for token_id, one in expected.items() if token_id in got
    )


def _compare_text(
    finding: GreedyFinding, plain: RequestOutput, speculated: RequestOutput, *, tie_gap: float | None
) -> GreedyFinding:
    """The finding about a prompt, or what is to be said of another output of it, which may lack log probabilities."""
    expected, got = plain.outputs[0], speculated.outputs[0]
    position = _first_difference(expected.token_ids, got.token_ids)
    if position is None or finding.verdict is Verdict.BUG:
        return finding
    return _judge_parting(finding, expected, got, position=position, tie_gap=tie_gap)


def _first_difference(expected: Sequence[object], got: Sequence[object]) -> int | None:
    """The first position where the two differ or one of them ends; None if they are equal."""
    position = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    if position is None and len(expected) != len(got):
        return min(len(expected), len(got))
    return position


def _judge_parting(
    finding: GreedyFinding, expected: CompletionOutput, got: CompletionOutput, *, position: int, tie_gap: float | None
) -> GreedyFinding:
    """A finding about two texts that part at `position`."""
    if position in (len(expected.token_ids), len(got.token_ids)):
        return replace(finding, verdict=Verdict.BUG, position=position)
    logprobs, token_id = (expected.logprobs or [])[position], got.token_ids[position]
    best, second = sorted(logprobs, key=lambda token_id: -logprobs[token_id].logprob)[:2]
    gap = logprobs[best].logprob - logprobs[second].logprob
    is_tie = tie_gap is not None and gap <= tie_gap and token_id in (best, second)
    return replace(
        finding,
        verdict=Verdict.TIE if is_tie else Verdict.BUG,
        position=position,
        gap=gap,
        plain_token=logprobs[expected.token_ids[position]].decoded_token,
        speculated_token=logprobs[token_id].decoded_token if token_id in logprobs else f"id {token_id}",
    )


def is_near_tie(llm: LLM, text: Sequence[int], token_id: int, other: int) -> bool:
    """Whether two tokens are the target's two best after a text, within the gap that rounding can reverse.

    Always False on kernels whose results do not depend on the batch.
    """
    if llm.is_batch_invariant:
        return False
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=2, speculation="off", ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": text}, sampling, use_tqdm=False)
    (logprobs,) = output.outputs[0].logprobs or [{}]
    best, second = sorted(logprobs, key=lambda candidate: -logprobs[candidate].logprob)[:2]
    gap = logprobs[best].logprob - logprobs[second].logprob
    return {token_id, other} == {best, second} and gap <= TIE_GAP[llm.dtype]
