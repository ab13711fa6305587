"""The seam between engine and models."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A target model with the attention it computes with, its tokenizer (None: token ids only) and the tokens that end its texts.

    `path` is the folder or file it comes from (None: made in memory); `kernels` are the native ones
    that its weights are packed for (None: torch computes).
    """

    model: TargetModel
    attention: Attention = field(default_factory=PagedAttention)
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    path: Path | None = None
    kernels: Kernels | None = None


def choose_attention(kv_specs: Iterable[LayerKVSpec], kernels: Kernels | None) -> Attention:
    """The kernels' own attention where there are kernels that take keys of these sizes, else torch's."""
    return NativeAttention(kernels) if kernels and can_attend(kv_specs) else PagedAttention()
