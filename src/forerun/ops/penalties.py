"""Biases, and penalties for tokens that the text already holds; both touch few tokens of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.core.exact_math import Float32s
from forerun.core.sampling_params import SamplingParams

Int32s = npt.NDArray[np.int32]


class LogitBias:
    """A fixed number added to the logits of some tokens: `token_ids` [n], each once, and `values` [n]."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.token_ids: Int32s = np.array(list(bias), dtype=np.int32)
        self.values: Float32s = np.array(list(bias.values()), dtype=np.float32)

    def apply(self, logits: Float32s) -> None:
        """Add the biases to `logits` [vocab_size] in place."""
        logits[self.token_ids] += self.values


def penalises(params: SamplingParams) -> bool:
    """Whether any penalty differs from its neutral value."""
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


@dataclass(frozen=True, slots=True)
class PenalisedTokens:
    """The tokens that penalties touch at one place of a text.

    `token_ids` [n], each once; `counts` [n]: how often it is in the output, 0 for one of the prompt alone.
    """

    token_ids: Int32s
    counts: Float32s
    repetition: float
    frequency: float
    presence: float

    def apply(self, logits: Float32s) -> None:
        """Penalise `logits` [vocab_size] in place; csrc/sampling.h does the same operations."""
        before = logits[self.token_ids]
        # Positive logits are divided and negative ones multiplied: both make a token less likely (factor > 1).
        scaled = np.where(before > 0, before / np.float32(self.repetition), before * np.float32(self.repetition))
        scaled = scaled - np.float32(self.frequency) * self.counts
        logits[self.token_ids] = scaled - np.where(self.counts > 0, np.float32(self.presence), np.float32(0))


class Penalties:
    """One request's repetition, frequency and presence penalties.

    Repetition scales the logits of all tokens of prompt and output (arXiv 1909.05858); frequency subtracts
    per occurrence in the output, presence once (OpenAI's definitions).

    The output only grows, so each token of it is counted once; the tokens of a draft's path are added on top for
    one call. Counts are kept of the text's own tokens, from the first row on: a request that waits holds none.
    """

    def __init__(self, params: SamplingParams, *, prompt_ids: Sequence[int]) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        self._prompt_ids = prompt_ids
        self._counts: _TokenCounts | None = None
        self._num_counted = 0

    def at(self, output_ids: Sequence[int], path: Sequence[int] = ()) -> PenalisedTokens:
        """The tokens that are penalised after `output_ids` + `path`."""
        if self._counts is None:
            self._counts = _TokenCounts()
            if self._repetition != 1.0:
                self._counts.add(self._prompt_ids, 0)
        assert len(output_ids) >= self._num_counted, "a sequence's output only grows"
        self._counts.add(output_ids[self._num_counted :], 1)
        self._num_counted = len(output_ids)
        counts = self._counts
        if path:
            counts = counts.copy()
            counts.add(path, 1)
        return PenalisedTokens(*counts.arrays, self._repetition, self._frequency, self._presence)


class _TokenCounts:
    """How often each token came, for those that came, in the order of their first appearance."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._token_ids = np.empty(64, dtype=np.int32)
        self._counts = np.zeros(64, dtype=np.float32)

    @property
    def arrays(self) -> tuple[Int32s, Float32s]:
        """Token ids [n] and counts [n], views that stay as they are until the next `add`."""
        num_tokens = len(self._places)
        return self._token_ids[:num_tokens], self._counts[:num_tokens]

    def add(self, token_ids: Sequence[int], count: int) -> None:
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._token_ids):
                self._token_ids = np.resize(self._token_ids, 2 * place)
                self._counts = np.concatenate([self._counts, np.zeros(place, dtype=np.float32)])
            self._token_ids[place] = token_id
            self._counts[place] += count

    def copy(self) -> _TokenCounts:
        other = _TokenCounts()
        other._places = self._places.copy()
        other._token_ids, other._counts = self._token_ids.copy(), self._counts.copy()
        return other
