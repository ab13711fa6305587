"""Greedy proof: speculated text against plain text, and what to think of a difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from forerun.core.outputs import RequestOutput
from forerun.core.sampling_params import SamplingParams
from forerun.engine.inputs import Prompt
from forerun.llm import LLM
from forerun.proof.report import GreedyFinding, Verdict

TIE_GAP = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Logit gaps (nats) that rounding can overturn when the batch has another shape, by dtype."""


def check_greedy(
    llm: LLM, prompts: Sequence[str], *, max_tokens: int, progress: Callable[[str], None]
) -> list[GreedyFinding]:
    """Decode each prompt plainly and with speculation, all together, and compare token by token.

    Prompts are taken as a user's messages where the model has a chat template.
    """
    texts = [_laid_out(llm, prompt) for prompt in prompts]
    plain_sampling = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=2, speculation="off")
    progress("greedy: plain decoding")
    plain = llm.generate(texts, plain_sampling, use_tqdm=False)
    progress("greedy: with speculation")
    speculated = llm.generate(texts, SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    tie_gap = TIE_GAP[llm.dtype]
    return [compare(a, b, tie_gap=tie_gap) for a, b in zip(plain, speculated, strict=True)]


def _laid_out(llm: LLM, prompt: str) -> Prompt:
    tokenizer = llm.get_tokenizer()
    if not tokenizer.has_chat_template:
        return prompt
    return {"prompt": prompt, "prompt_token_ids": tokenizer.apply_chat_template([{"role": "user", "content": prompt}])}


def compare(plain: RequestOutput, speculated: RequestOutput, *, tie_gap: float) -> GreedyFinding:
    """Judge one prompt's two outputs; `plain` carries the two best logprobs of each token.

    A difference is a tie only if the speculated token was the target's second best and the gap
    between the two is within `tie_gap`; any other difference is a bug.
    """
    expected, got = plain.outputs[0].token_ids, speculated.outputs[0].token_ids
    stats = speculated.speculation
    position = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    if position is None and len(expected) != len(got):
        position = min(len(expected), len(got))
    finding = GreedyFinding(
        prompt=plain.prompt or "",
        num_tokens=len(got),
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        verdict=Verdict.EQUAL,
    )
    if position is None:
        return finding
    if position in (len(expected), len(got)):
        return replace(finding, verdict=Verdict.BUG, position=position)
    logprobs = (plain.outputs[0].logprobs or [])[position]
    best, second = sorted(logprobs, key=lambda token_id: -logprobs[token_id].logprob)[:2]
    gap = logprobs[best].logprob - logprobs[second].logprob
    is_tie = gap <= tie_gap and got[position] in (best, second)
    return replace(
        finding,
        verdict=Verdict.TIE if is_tie else Verdict.BUG,
        position=position,
        gap=gap,
        plain_token=logprobs[expected[position]].decoded_token,
        speculated_token=logprobs[got[position]].decoded_token if got[position] in logprobs else f"id {got[position]}",
    )
