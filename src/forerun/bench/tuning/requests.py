"""The requests of a tuning: the prompts in their order, each with its own seed, at the moments that the load says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.bench.load.sender import draw_arrivals
from forerun.bench.load.workload import Traffic
from forerun.bench.recording import RecordedText
from forerun.core.sampling_params import SamplingParams
from forerun.plan.sla import Sla
from forerun.plan.tuning.drive import OfferedRequest
from forerun.plan.tuning.offered_load import OfferedLoad

KIND = "prompts"
"""The one kind of texts in a recording of a tuning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningWorkload:
    """What is served: prompts (token ids), how they are answered, how they come, and what is promised.

    The number of a prompt is its seed, so that an answer is the same text in every run of every lossless
    configuration. `seed` is that of the moments of arrival.
    """

    prompts: Sequence[list[int]] = field(repr=False)
    load: OfferedLoad
    max_tokens: int
    temperature: float
    sla: Sla | None
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return max(map(len, self.prompts)) + self.max_tokens

    def most_running(self, max_num_seqs: int) -> int:
        """The most sequences that can run at once under this limit."""
        return min(self.load.most_running(max_num_seqs), len(self.prompts))

    def requests(self) -> list[OfferedRequest]:
        """All requests, as a client sends them."""
        return [
            OfferedRequest(prompt_ids=prompt, sampling=self._sampling(number, self.max_tokens), arrival=arrival)
            for number, (prompt, arrival) in enumerate(zip(self.prompts, self._arrivals(), strict=True))
        ]

    def recorded_requests(self, texts: Sequence[RecordedText]) -> list[OfferedRequest]:
        """The same where the answers are known: each ends after its recorded tokens."""
        return [
            OfferedRequest(
                prompt_ids=prompt, sampling=self._sampling(number, len(text.answer_ids), is_known=True), arrival=arrival
            )
            for number, (prompt, text, arrival) in enumerate(zip(self.prompts, texts, self._arrivals(), strict=True))
        ]

    def warm_up(self, count: int, max_tokens: int) -> list[OfferedRequest]:
        """The first prompts, all at once and with short answers."""
        return [
            OfferedRequest(prompt_ids=prompt, sampling=self._sampling(number, min(max_tokens, self.max_tokens)))
            for number, prompt in enumerate(self.prompts[:count])
        ]

    def _sampling(self, number: int, max_tokens: int, *, is_known: bool = False) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=max_tokens,
            seed=number,
            ignore_eos=is_known,
            detokenize=not is_known,
        )

    def _arrivals(self) -> list[float]:
        """Seconds from the start; the last of N at N / rate, as in `forerun bench serve`."""
        if self.load.rate is None:
            return [0.0] * len(self.prompts)
        traffic = Traffic(request_rate=self.load.rate, burstiness=self.load.burstiness)
        times: list[float] = draw_arrivals(traffic, len(self.prompts), np.random.default_rng(self.seed)).tolist()
        return times
