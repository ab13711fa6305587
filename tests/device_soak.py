"""A soak of an engine: rounds of requests of all kinds, some of which are left, after each of which nothing may be held."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from forerun import LLM, SamplingParams
from forerun.errors import RequestError

NUM_FIRST_ROUNDS = 3  # in which what is made once may be made

RULES = [
    {},
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 20},
    {"temperature": 1.1, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0, "presence_penalty": 0.5, "logit_bias": {7: 2.0}},
    {"temperature": 0.7, "n": 3},
    {"temperature": 0, "logprobs": 2},
]


@dataclass
class Soak:
    """Rounds of requests, until the time is up.

    `bytes_held` says how much memory is taken at a moment; it may not grow by more than `most_growth` bytes after the first rounds.
    """

    llm: LLM
    bytes_held: Callable[[], int]
    most_growth: int
    seed: int = 0
    num_rounds: int = 0
    num_requests: int = 0
    failures: list[str] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # after each round

    def run(self, seconds, *, least_rounds=NUM_FIRST_ROUNDS + 2):
        """Run rounds for so long, and at least so many of them; what is wrong is in `failures`."""
        source, end = random.Random(self.seed), time.monotonic() + seconds
        while self.num_rounds < least_rounds or (time.monotonic() < end and not self.failures):
            self._round(source)
            self.num_rounds += 1
            self._check_rest()
        first = max(self.held[:NUM_FIRST_ROUNDS])
        if (growth := max(self.held[NUM_FIRST_ROUNDS:]) - first) > self.most_growth:
            self.failures.append(f"{growth} bytes more are held than after the first rounds ({first})")

    def _round(self, source):
        """Requests that arrive together; of each round one stream is left before its end, and one request is refused."""
        prompts = [self._prompt(source) for _ in range(source.randint(1, 12))]
        params = [
            SamplingParams(max_tokens=source.randint(1, 30), seed=source.randrange(99), **source.choice(RULES))
            for _ in prompts
        ]
        self.num_requests += len(prompts)
        for output in self.llm.generate(prompts, params, use_tqdm=False):
            if output.error is not None:
                self.failures.append(output.error)
        stream = self.llm.stream(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        for _ in range(source.randrange(5)):
            next(stream)
        stream.close()
        try:
            self.llm.generate([[self.llm.vocab_size]], use_tqdm=False)
            self.failures.append("a token that does not exist was taken")
        except RequestError:
            pass

    def _prompt(self, source):
        words = [source.randrange(6, self.llm.vocab_size) for _ in range(source.randint(1, 15))]
        return words * source.choice((1, 1, 3))

    def _check_rest(self):
        """Nothing runs, no block and no sequence is held; what memory is taken is noted."""
        parts, executor = self.llm.engine.parts, self.llm.executor
        for _ in range(2):  # what is in flight is applied, though nobody waits for it any more
            if self.llm.engine.has_work:
                self.llm.engine.step()
        if self.llm.engine.has_work or parts.scheduler.waiting or parts.scheduler.running:
            self.failures.append("something still runs")
        if parts.pool.num_free != parts.pool.num_blocks:
            self.failures.append(f"{parts.pool.num_blocks - parts.pool.num_free} blocks are held")
        if executor._states:
            self.failures.append(f"{len(executor._states)} sequences are known to the executor")
        self.held.append(self.bytes_held())
