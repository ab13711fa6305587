"""Computes what a head learns from: the target's hidden states and its probabilities.

The engine's own model computes them, on the CPU's native kernels where there are any and by torch on a GPU, so they are
those that the head will see when it drafts. That is done anew for each batch, unless they are kept (`KeptFeatures`, `FeaturesInMemory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.executor.host_copies import to_device
from forerun.kv.cache import KVCache
from forerun.models.base import LoadedTarget
from forerun.ops.native import training as native
from forerun.train.attention import CausalAttention
from forerun.train.draft_loss import ROWS_AT_ONCE, drafted_probs
from forerun.train.kept_features import FeaturesInMemory, KeptFeatures
from forerun.train.selection import LearnedText
from forerun.train.target import BLOCK_SIZE, lay_out

LAST = "last_hidden"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTexts:
    """B texts padded to S tokens, the target's features of each token, and what it predicts at N places.

    Attributes:
        token_ids: [B, S] int64, padded with 0 at the end.
        features: name -> [B, S, hidden_size of the target], 0 for a text's last token and behind it.
        rows: the text of each learned place, [N] int64.
        places: the place in its text, [N] int64.
        first_place: the smallest of them, which nobody has to ask a GPU for.
        wanted: the target's probabilities of the tokens that can be drafted, [N, V] in the head's dtype; what is
            missing to 1 are tokens that cannot.
    """

    token_ids: Tensor
    features: dict[str, Tensor]
    rows: Tensor
    places: Tensor
    first_place: int
    wanted: Tensor


class Observer:
    """Runs the target over texts, with a KV cache that is kept from one batch to the next."""

    def __init__(
        self,
        target: LoadedTarget,
        features: Sequence[str],
        draft_ids: Tensor,
        kept: KeptFeatures | FeaturesInMemory | None = None,
    ) -> None:
        assert kept is None or kept.names == (*features, LAST), "what is kept is what is asked for"
        self._target = target
        self._names = tuple(features)
        self._draft_ids = draft_ids
        self._kept = kept
        self._cache: KVCache | None = None
        self._num_blocks = 0

    @torch.no_grad()
    def observe(self, texts: Sequence[LearnedText]) -> ObservedTexts:
        """Compute features and probabilities of texts.

        Raises:
            ConfigError: they cannot be kept on disk.
        """
        states = self._states(texts)  # of each text [S - 1, features, width]: nothing is learnt at the last token
        device, longest = self._target.model.device, max(len(text.token_ids) for text in texts)
        token_ids = torch.zeros(len(texts), longest, dtype=torch.int64, device="cpu")
        by_name = states[0].new_zeros(len(self._names) + 1, len(texts), longest, states[0].shape[-1])
        for row, (text, own) in enumerate(zip(texts, states, strict=True)):
            token_ids[row, : len(text.token_ids)] = torch.from_numpy(text.token_ids)
            by_name[:, row, : len(own)] = own.transpose(0, 1)
        learned = np.concatenate([text.places for text in texts])
        places = to_device(learned, device)
        rows = to_device(np.repeat(np.arange(len(texts)), [len(text.places) for text in texts]), device)
        return ObservedTexts(
            token_ids=to_device(token_ids.numpy(), device),
            features=dict(zip(self._names, by_name[:-1], strict=True)),
            rows=rows,
            places=places,
            first_place=int(learned.min()),
            wanted=self._wanted(by_name[-1, rows, places]),
        )

    def _states(self, texts: Sequence[LearnedText]) -> list[Tensor]:
        """The hidden states of each text but of its last token, those of `_names` and the last, read or computed."""
        ids = [torch.from_numpy(text.token_ids[:-1]) for text in texts]
        if self._kept is None:
            return self._compute(ids)
        found = {
            index: states.to(self._target.model.device, self._target.model.dtype)  # the device may have changed since
            for index, (text, own) in enumerate(zip(texts, ids, strict=True))
            if (states := self._kept.read(text.number, own)) is not None
        }
        missing = [index for index in range(len(texts)) if index not in found]
        if missing:
            for index, states in zip(missing, self._compute([ids[index] for index in missing]), strict=True):
                self._kept.write(texts[index].number, ids[index], states)
                found[index] = states
        return [found[index] for index in range(len(texts))]

    def _compute(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """Run the target: on the kernels over rows without padding, by torch over texts of one length, in few calls."""
        model = self._target.model
        lengths = [len(own) for own in ids]
        on_kernels = self._target.kernels is not None
        rows_each = lengths if on_kernels else [max(lengths)] * len(ids)
        nothing = torch.zeros(0, dtype=torch.int64, device=model.device)
        names = (*self._names, LAST)
        batch = lay_out(model, ids, rows_each, features=frozenset(names), logits_rows=nothing)
        if on_kernels:
            attend = self._target.attention.begin(batch, self._room(sum(len(one.block_ids) for one in batch.sequences)))
        else:
            attend = CausalAttention(len(ids))
        result = model.forward(batch, attend)
        states = torch.stack([result.features[name].to(model.dtype) for name in names], dim=1).split(rows_each)  # type: ignore[no-untyped-call]
        return [own[:length] for own, length in zip(states, lengths, strict=True)]

    def _room(self, needed: int) -> KVCache:
        """A cache of at least so many blocks."""
        model = self._target.model
        if self._cache is None or self._num_blocks < needed:
            self._num_blocks = needed
            self._cache = KVCache(
                model.kv_specs, num_blocks=needed, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device
            )
        return self._cache

    def _wanted(self, last_hidden: Tensor) -> Tensor:
        """Compute the probabilities of the tokens that can be drafted, [N, V], from hidden states [N, width]."""
        model, kernels = self._target.model, self._target.kernels
        wanted = last_hidden.new_empty(len(last_hidden), len(self._draft_ids))
        at_once = ROWS_AT_ONCE[last_hidden.device.type]
        for first in range(0, len(last_hidden), at_once):
            rows = slice(first, first + at_once)
            logits = model.logits(last_hidden[rows])
            if kernels is None:
                wanted[rows] = drafted_probs(logits, self._draft_ids, wanted.dtype)
            else:
                native.drafted_probs(kernels, logits, self._draft_ids, out=wanted[rows])
        return wanted
