"""A batch of prompts answered once, against the clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.bench.clock import Clock
from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import SpeculationStats, StepTimes
from forerun.errors import RequestError
from forerun.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Texts of one batch and what they took.

    *Decoding* begins when each prompt has its first token; `speculation` and `times` are of its steps
    alone, so that what reading the prompts takes does not enter them.
    """

    texts: list[list[int]]  # token ids, by prompt
    seconds: float  # from the requests to the last token
    decode_seconds: float  # of these, decoding
    num_decode_tokens: int
    num_failed_drafts: int
    speculation: SpeculationStats
    times: StepTimes

    @property
    def num_tokens(self) -> int:
        """Tokens written."""
        return sum(map(len, self.texts))


def answer(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    salt: str,
    clock: Clock = time.perf_counter,
) -> Answers:
    """Answer prompts (token ids), given at once, to their ends.

    `salt` keeps them from the KV and from what a drafter remembers of the prompts of other salts.

    Raises:
        RequestError: a request does not fit, or failed while it ran.
    """
    texts: list[list[int]] = [[] for _ in prompts]
    silent = set(range(len(prompts)))
    num_failed_drafts = 0
    llm.reset_stats()
    start = decode_start = clock()
    for delta in llm.stream([{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts], params):
        if delta.finish_reason == "error":
            raise RequestError(f"prompt {delta.request_id} failed: {delta.stop_reason}; nothing was measured")
        place = int(delta.request_id)
        texts[place] += delta.token_ids
        if silent and delta.token_ids:
            silent.discard(place)
            if not silent:
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
