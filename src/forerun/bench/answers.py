"""Answers one batch of prompts and times it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.bench.instruments import Clock
from forerun.core.outputs import RequestOutput
from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import SpeculationStats, StepTimes
from forerun.errors import RequestError
from forerun.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The texts of one batch, with times and counts.

    Decoding begins when each prompt has its first token. `speculation` and `times` are of decoding
    steps alone, without prefill.
    """

    texts: list[list[int]]  # token ids, one text per prompt
    seconds: float  # from the requests to the last token
    decode_seconds: float  # the part of these after each prompt's first token
    num_decode_tokens: int
    num_failed_drafts: int
    speculation: SpeculationStats
    times: StepTimes

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(map(len, self.texts))


def answer(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    salt: str,
    clock: Clock = time.perf_counter,
) -> Answers:
    """Answer prompts (token ids) as one batch to their ends.

    Prompts of different salts share neither prefix-cached KV nor what a drafter remembers.

    Raises:
        RequestError: a request does not fit, or failed while it ran.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    without_token = set(range(len(prompts)))
    num_failed_drafts = 0
    llm.reset_stats()
    start = decode_start = clock()
    for delta in llm.stream([{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts], params):
        if delta.finish_reason == "error":
            raise RequestError(f"prompt {delta.request_id} failed: {delta.stop_reason}; nothing was measured")
        place = int(delta.request_id)
        texts[place] += delta.token_ids
        if without_token and delta.token_ids:
            without_token.discard(place)
            if not without_token:
                num_failed_drafts = llm.stats.num_failed_drafts
                llm.reset_stats()
                decode_start = clock()
    end = clock()
    return Answers(
        texts=texts,
        seconds=end - start,
        decode_seconds=end - decode_start,
        num_decode_tokens=llm.stats.num_generation_tokens,
        num_failed_drafts=num_failed_drafts + llm.stats.num_failed_drafts,
        speculation=llm.stats.speculation,
        times=llm.stats.times,
    )


def check_outputs(outputs: Sequence[RequestOutput]) -> None:
    """Refuse a measurement in which a request failed.

    Raises:
        RequestError: a request failed.
    """
    for output in outputs:
        if output.error is not None:
            raise RequestError(f"request {output.request_id} failed: {output.error}; nothing was measured")
