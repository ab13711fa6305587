"""The seam between engine and models."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, ForwardResult, LayerKVSpec
from forerun.ops.attention.base import Attend


class CausalModel(Protocol):
    """A causal language model that computes one packed forward pass over a paged KV cache."""

    vocab_size: int  # width of the logits
    hidden_size: int
    num_layers: int
    max_model_len: int  # tokens, as the checkpoint's configuration allows
    kv_specs: list[LayerKVSpec]
    dtype: torch.dtype
    device: torch.device
    is_batch_invariant: bool  # a row's logits depend on its own text alone, bit for bit

    def forward(self, batch: ForwardBatch, attend: Attend) -> ForwardResult:
        """Compute logits at `batch.logits_rows` and the features that `batch.features` names.

        Features: "last_hidden" is the hidden state after the final norm; "hidden.N" the residual
        stream before layer N (0 = embeddings, num_layers = after the last layer, un-normed).
        """
        ...


class TargetModel(CausalModel, Protocol):
    """A causal model whose embedding and head others may use: drafters that were trained with them."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, hidden_size], as the first layer gets it."""
        ...

    def logits(self, normed: Tensor) -> Tensor:
        """Hidden states after the final norm [R, hidden_size] -> [R, vocab_size] fp32"""
        ...

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """The head's weights of some tokens: [n] int64 -> [n, hidden_size]"""
        ...
