"""Computes what a head learns from, anew for each batch: the target's hidden states and its probabilities.

The engine's own model computes them, on the native kernels where there are any, so they are those that the head
will see when it drafts, and nothing is kept on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.kv.cache import KVCache
from forerun.models.base import LoadedTarget
from forerun.ops.attention import Attend
from forerun.train.selection import LearnedText
from forerun.train.target import BLOCK_SIZE

LOGITS_ROWS = 128  # of the whole vocabulary in fp32 at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTexts:
    """B texts padded to S tokens, the target's features of each token, and what it predicts at N places.

    Attributes:
        token_ids: [B, S] int64, padded with 0 at the end.
        features: name -> [B, S, hidden_size of the target].
        rows: the text of each learned place, [N] int64.
        places: the place in its text, [N] int64.
        wanted: the target's probabilities of the tokens that can be drafted, [N, V] in the head's dtype; what is
            missing to 1 are tokens that cannot.
    """

    token_ids: Tensor
    features: dict[str, Tensor]
    rows: Tensor
    places: Tensor
    wanted: Tensor


class Observer:
    """Runs the target over texts, with a KV cache that is kept from one batch to the next."""

    def __init__(self, target: LoadedTarget, features: Sequence[str], draft_ids: Tensor) -> None:
        self._target = target
        self._names = tuple(features)
        self._draft_ids = draft_ids
        self._cache: KVCache | None = None
        self._num_blocks = 0

    @torch.no_grad()
    def observe(self, texts: Sequence[LearnedText]) -> ObservedTexts:
        """Compute features and probabilities of texts."""
        model = self._target.model
        lengths = [len(text.token_ids) for text in texts]
        starts = np.cumsum([0, *lengths])
        result = model.forward(*self._pass(texts, lengths))
        learned = np.concatenate([text.places + start for text, start in zip(texts, starts, strict=False)])
        longest = max(lengths)
        index = torch.zeros(len(texts), longest, dtype=torch.int64)
        token_ids = torch.zeros(len(texts), longest, dtype=torch.int64)
        for row, text in enumerate(texts):
            index[row, : lengths[row]] = torch.arange(starts[row], starts[row + 1])
            token_ids[row, : lengths[row]] = torch.from_numpy(text.token_ids)
        return ObservedTexts(
            token_ids=token_ids,
            features={name: result.features[name].to(model.dtype)[index] for name in self._names},
            rows=torch.repeat_interleave(torch.tensor([len(text.places) for text in texts])),
            places=torch.from_numpy(np.concatenate([text.places for text in texts])),
            wanted=self._wanted(result.features["last_hidden"], torch.from_numpy(learned)),
        )

    def _pass(self, texts: Sequence[LearnedText], lengths: Sequence[int]) -> tuple[ForwardBatch, Attend]:
        """Lay texts out one after the other, without padding."""
        model = self._target.model
        num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        firsts = np.cumsum([0, *num_blocks])
        tables = [np.arange(firsts[row], firsts[row + 1], dtype=np.int32) for row in range(len(texts))]
        places = [torch.arange(length) for length in lengths]
        batch = ForwardBatch(
            token_ids=torch.from_numpy(np.concatenate([text.token_ids for text in texts])).to(model.device),
            positions=torch.cat(places).to(model.device),
            slot_mapping=torch.cat([int(firsts[row]) * BLOCK_SIZE + own for row, own in enumerate(places)]).to(
                model.device
            ),
            sequences=[
                SequenceRows(num_context=0, num_rows=length, block_ids=table)
                for length, table in zip(lengths, tables, strict=True)
            ],
            block_size=BLOCK_SIZE,
            logits_rows=torch.zeros(0, dtype=torch.int64, device=model.device),
            features=frozenset({*self._names, "last_hidden"}),
        )
        needed = int(firsts[-1])
        if self._cache is None or self._num_blocks < needed:
            self._num_blocks = needed
            self._cache = KVCache(
                model.kv_specs, num_blocks=needed, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device
            )
        return batch, self._target.attention.begin(batch, self._cache)

    def _wanted(self, last_hidden: Tensor, learned: Tensor) -> Tensor:
        """Compute the probabilities of the tokens that can be drafted at learned rows, [N, V]."""
        model = self._target.model
        wanted = torch.empty(len(learned), len(self._draft_ids), dtype=model.dtype)
        for first in range(0, len(learned), LOGITS_ROWS):
            rows = slice(first, first + LOGITS_ROWS)
            logits = model.logits(last_hidden[learned[rows]])
            odds = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
            wanted[rows] = odds.index_select(1, self._draft_ids) / odds.sum(-1, keepdim=True)
        return wanted
