"""The interface between models and those that run them: the engine and the drafters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, ForwardResult, LayerKVSpec
from forerun.models.tokenizer import Tokenizer
from forerun.ops.attention.base import Attend, Attention
from forerun.ops.attention.paged import PagedAttention
from forerun.ops.native.attention import NativeAttention, can_attend
from forerun.ops.native.library import Kernels


class CausalModel(Protocol):
    """A causal language model that computes one packed forward pass over a paged KV cache."""

    vocab_size: int  # width of the logits
    hidden_size: int
    num_layers: int
    max_model_len: int  # tokens, as the checkpoint's configuration allows
    kv_specs: list[LayerKVSpec]
    dtype: torch.dtype
    device: torch.device
    is_batch_invariant: bool  # a row's logits do not depend, in any bit, on what else is in the batch

    def forward(self, batch: ForwardBatch, attend: Attend) -> ForwardResult:
        """Compute logits at `batch.logits_rows` and the hidden states that `batch.features` names.

        "last_hidden" is the hidden state after the final norm, "hidden.N" the residual stream before
        layer N (0: the embeddings; num_layers: after the last layer, before the final norm).
        """
        ...


class TargetModel(CausalModel, Protocol):
    """A causal model that shares its embedding and head with drafters, which are trained on top of them."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed tokens: [T] int64 -> [T, hidden_size], the input of the first layer."""
        ...

    def logits(self, normed: Tensor) -> Tensor:
        """Apply the head: hidden states after the final norm [R, hidden_size] -> [R, vocab_size] fp32."""
        ...

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Return the head's weights of some tokens: [n] int64 -> [n, hidden_size]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A target model and all that belongs to it.

    Attributes:
        model: the model itself.
        attention: the attention that it computes with.
        tokenizer: None where requests give token ids only.
        eos_token_ids: the tokens that end a text.
        path: the folder or file that it was loaded from, or None if it was made in memory.
        kernels: the native kernels that its weights are packed for, or None if torch computes.
    """

    model: TargetModel
    attention: Attention = field(default_factory=PagedAttention)
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    path: Path | None = None
    kernels: Kernels | None = None


def choose_attention(kv_specs: Iterable[LayerKVSpec], kernels: Kernels | None) -> Attention:
    """Choose the native kernels' attention if they can compute keys of these sizes, else torch's."""
    return NativeAttention(kernels) if kernels and can_attend(kv_specs) else PagedAttention()
