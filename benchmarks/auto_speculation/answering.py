"""Lets an engine answer a group of requests, and times its steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.auto_speculation.workloads import Request
from forerun import LLM
from forerun.bench.instruments import Clock
from forerun.core.stats import SpeculationStats
from forerun.engine.client import EngineRequest
from forerun.errors import RequestError

_REQUEST_IDS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The texts of a group, with times and counts.

    The `decode_` figures are of the steps that computed no token of a prompt. `speculation` counts every
    sequence's part of every step, its first one too, whose draft is empty.
    """

    texts: list[list[int]]  # token ids, one text per request
    seconds: float
    decode_seconds: float
    num_decode_tokens: int
    num_failed_drafts: int
    speculation: SpeculationStats

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(map(len, self.texts))


def answer(llm: LLM, requests: Sequence[Request], *, salt: str, clock: Clock = time.perf_counter) -> Answers:
    """Answer requests, all given at once, to their ends.

    Requests of different salts share neither prefix-cached KV nor what a drafter has learnt.

    Raises:
        RequestError: a request does not fit, or failed while it ran.
    """
    engine = llm.engine
    llm.reset_stats()
    texts: dict[str, list[int]] = {}
    decode_seconds, num_decode_tokens = 0.0, 0
    start = clock()
    for request in requests:
        request_id = f"answer-{next(_REQUEST_IDS)}"
        texts[request_id] = []
        engine.accept(
            EngineRequest(request_id=request_id, prompt_ids=request.prompt, sampling=request.sampling, cache_salt=salt)
        )
        engine.submit(request_id)
    step_start = clock()
    while engine.has_work:
        num_prompt_tokens = engine.stats.num_prompt_tokens
        output = engine.step()
        num_tokens = 0
        for delta in output.deltas:
            if delta.finish_reason == "error":
                raise RequestError(f"a request failed: {delta.stop_reason}; nothing was measured")
            texts[delta.request_id] += delta.token_ids
            num_tokens += len(delta.token_ids)
        step_end = clock()
        if engine.stats.num_prompt_tokens == num_prompt_tokens:
            decode_seconds += step_end - step_start
            num_decode_tokens += num_tokens
        step_start = step_end
    return Answers(
        texts=[*texts.values()],
        seconds=step_start - start,
        decode_seconds=decode_seconds,
        num_decode_tokens=num_decode_tokens,
        num_failed_drafts=llm.stats.num_failed_drafts,
        speculation=llm.stats.speculation,
    )
