"""One sequence of tokens: a prompt and what has been generated after it."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.sampling_params import SamplingParams


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A prompt and its committed continuation; what drafters and verifiers may read of a request.

    `output_ids` grows by the tokens that each step commits. It is cut once, when the sequence has ended: what
    stands of it may be less, as behind a stop string. `seed` keys the noise
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
        return tokens_between(self.prompt_ids, self.output_ids, start, end)

    def tokens_from(self, start: int) -> list[int]:
        """Committed tokens from index `start` of the sequence on, prompt included."""
        return self.tokens_between(start, len(self))


def tokens_between(prompt_ids: list[int], output_ids: list[int], start: int, end: int) -> list[int]:
    """Tokens at places [start, end) of a prompt and what follows it."""
    num_prompt = len(prompt_ids)
    if start >= num_prompt:
        return output_ids[start - num_prompt : end - num_prompt]
    return prompt_ids[start:end] + output_ids[: max(0, end - num_prompt)]
