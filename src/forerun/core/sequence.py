"""One sequence of tokens: a prompt and what has been generated after it."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.sampling_params import SamplingParams


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A prompt and its committed continuation; what drafters and verifiers may read of a request.

    `output_ids` grows by the tokens that each step commits and is never cut. `seed` keys the noise
    of every sampled token. Sequences with different `cache_salt` share neither KV blocks nor the
    pools that drafters keep of past responses. `prediction_ids` is the continuation that the client
    expects, which may be wrong, or empty.
    """

    seq_id: int
    prompt_ids: list[int]
    output_ids: list[int]
    sampling: SamplingParams
    seed: int
    cache_salt: str | None = None
    prediction_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Committed tokens at indices [start, end) of the sequence, prompt included."""
        num_prompt = len(self.prompt_ids)
        if start >= num_prompt:
            return self.output_ids[start - num_prompt : end - num_prompt]
        return self.prompt_ids[start:end] + self.output_ids[: max(0, end - num_prompt)]

    def tokens_from(self, start: int) -> list[int]:
        """Committed tokens from index `start` of the sequence on, prompt included."""
        return self.tokens_between(start, len(self))
