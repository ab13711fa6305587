"""What writes drafts: a model, or a head on the target's features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, LayerKVSpec
from forerun.models.base import CausalModel
from forerun.models.heads.base import DraftHead
from forerun.ops.attention.base import Attend


@dataclass(frozen=True, slots=True)
class Prediction:
    """At each of R rows: `logits` [R, V] fp32 of the next token, and the `states` [R, width] its reader needs (None: none)."""

    logits: Tensor
    states: Tensor | None = None


class Predictor(Protocol):
    """Predicts the token after each row; keeps an entry of KV for each, but for the first `num_hidden` places of a text."""

    needs: frozenset[str]
    kv_specs: list[LayerKVSpec]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    num_hidden: int
    target_ids: Tensor | None  # [V] int64 ascending, the target's token of each logit; None: V is its vocabulary

    def read_states(self, features: Mapping[str, Tensor], slots_before: Tensor) -> Tensor | None:
        """States for committed tokens, from the features at the slots [T] of the tokens before them; None: it takes none."""
        ...

    def predict(self, batch: ForwardBatch, states: Tensor | None, attend: Attend) -> Prediction:
        """Compute the rows of a pass ([T]; `states` [T, width]) and predict at `batch.logits_rows`."""
        ...


class ModelPredictor:
    """A whole model: it reads tokens and nothing else."""

    needs: frozenset[str] = frozenset()
    num_hidden = 0
    target_ids: Tensor | None = None

    def __init__(self, model: CausalModel) -> None:
        self.kv_specs = model.kv_specs
        self.dtype = model.dtype
        self.device = model.device
        self.max_model_len = model.max_model_len
        self._model = model

    def read_states(self, features: Mapping[str, Tensor], slots_before: Tensor) -> None:
        """It takes none."""

    def predict(self, batch: ForwardBatch, states: Tensor | None, attend: Attend) -> Prediction:  # noqa: ARG002
        """See `Predictor`."""
        return Prediction(self._model.forward(batch, attend).logits)


class HeadPredictor:
    """A head that reads each token with a state of the token before it: the target's own features where they are known.

    So its entry at place j is made of h[j - 1] and x[j], which is tokens of its own block and of those
    before, whatever follows (others keep it at j - 1, where it also depends on the next block's first
    token). Place 0 has none.
    """

    num_hidden = 1

    def __init__(self, head: DraftHead) -> None:
        self.needs = frozenset(head.needs)
        self.kv_specs = head.kv_specs
        self.dtype = head.dtype
        self.device = head.device
        self.max_model_len = head.max_model_len
        self.target_ids = head.target_ids
        self._head = head

    def read_states(self, features: Mapping[str, Tensor], slots_before: Tensor) -> Tensor:
        """See `Predictor`."""
        return self._head.fuse([features[name].index_select(0, slots_before) for name in self._head.needs])

    def predict(self, batch: ForwardBatch, states: Tensor | None, attend: Attend) -> Prediction:
        """See `Predictor`."""
        assert states is not None, "a head reads states"
        outputs = self._head.forward(batch.token_ids, states, batch.positions - 1, attend)
        outputs = outputs.index_select(0, batch.logits_rows)
        return Prediction(self._head.logits(outputs), self._head.states(outputs))
