"""Biases, and penalties for tokens that the text already holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from forerun.core.sampling_params import SamplingParams


class LogitBias:
    """A fixed number added to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._token_ids = torch.tensor(list(bias), dtype=torch.int64)
        self._values = torch.tensor(list(bias.values()), dtype=torch.float32)

    def apply(self, logits: Tensor) -> None:
        """Add the biases to `logits` [vocab_size] in place."""
        logits.index_add_(0, self._token_ids.to(logits.device), self._values.to(logits.device))


def penalises(params: SamplingParams) -> bool:
    """Whether any penalty differs from its neutral value."""
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


class Penalties:
    """One request's repetition, frequency and presence penalties.

    A step costs one pass over the vocabulary, however long the text is: the output only grows, so
    each token of it is counted once; the tokens of a draft's path are added on top for one call.
    Counts are allocated at the first row, so a request that waits holds none, and follow its device.
    """

    def __init__(self, params: SamplingParams, *, prompt_ids: Sequence[int], vocab_size: int) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._prompt_ids = prompt_ids
        self._vocab_size = vocab_size
        self._counts: Tensor | None = None  # [vocab_size] of each token among the first `_num_counted` of the output
        self._num_counted = 0
        self._in_prompt: Tensor | None = None  # [vocab_size] bool

    def apply(self, logits: Tensor, output_ids: Sequence[int], path: Sequence[int]) -> None:
        """Penalise `logits` [vocab_size] in place, for the token after `output_ids` + `path`.

        Repetition scales the logits of all tokens of prompt and output (arXiv 1909.05858);
        frequency subtracts per occurrence in the output, presence once (OpenAI's definitions).
        """
        counts = self._counts_at(output_ids, path, device=logits.device)
        in_output = counts > 0
        if self._repetition != 1.0:
            # Positive logits are divided and negative ones multiplied: both make the smaller of the two (factor > 1).
            smaller_or_larger = torch.minimum if self._repetition > 1.0 else torch.maximum
            scaled = smaller_or_larger(logits / self._repetition, logits * self._repetition)
            torch.where(in_output | self._prompt_mask(logits.device), scaled, logits, out=logits)
        if self._frequency != 0.0:
            logits.sub_(counts, alpha=self._frequency)
        if self._presence != 0.0:
            logits.sub_(in_output.to(logits.dtype), alpha=self._presence)

    def _counts_at(self, output_ids: Sequence[int], path: Sequence[int], *, device: torch.device) -> Tensor:
        if self._counts is None:
            self._counts = torch.zeros(self._vocab_size)
        self._counts = self._counts.to(device)
        assert len(output_ids) >= self._num_counted, "a sequence's output only grows"
        self._counts = _add(self._counts, output_ids[self._num_counted :])
        self._num_counted = len(output_ids)
        return _add(self._counts.clone(), path) if path else self._counts

    def _prompt_mask(self, device: torch.device) -> Tensor:
        """[vocab_size] bool, True for the tokens of the prompt."""
        if self._in_prompt is None:
            self._in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool)
            self._in_prompt[list(self._prompt_ids)] = True
        self._in_prompt = self._in_prompt.to(device)
        return self._in_prompt


def _add(counts: Tensor, token_ids: Sequence[int]) -> Tensor:
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=counts.device)
    return counts.index_add_(0, ids, torch.ones_like(ids, dtype=counts.dtype))
