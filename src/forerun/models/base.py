"""The interface between models, trained heads among them, and those that run them: the engine and the drafters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, ForwardResult, LayerKVSpec
from forerun.errors import ConfigError
from forerun.kv.cache import KVCache
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Layers
from forerun.models.fingerprint import fingerprint_of_files
from forerun.models.on_device import DeviceParts
from forerun.models.tokenizer import Tokenizer
from forerun.ops.attention import Attend, Attention
from forerun.ops.attention.paged import PagedAttention
from forerun.ops.layers import Head
from forerun.ops.native.attention import NativeAttention, can_attend
from forerun.ops.native.chains import NativeChains
from forerun.ops.native.layers import PackedHead
from forerun.ops.native.library import Kernels

NUM_HEAD_ROWS = 64  # of a model made in memory, which say which one it is


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
    finds_candidates: bool  # it finds candidates while the head computes, which costs next to nothing

    def forward(self, batch: ForwardBatch, attend: Attend) -> ForwardResult:
        """Compute logits at `batch.logits_rows`, their candidates, and the hidden states that `batch.features` names.

        "last_hidden" is the hidden state after the final norm, "hidden.N" the residual stream before
        layer N (0: the embeddings; num_layers: after the last layer, before the final norm).
        """
        ...


class TargetModel(CausalModel, Protocol):
    """A causal model that shares its embedding and head with drafters, which are trained on top of them."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices that a pass reads."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed tokens: [T] int64 -> [T, hidden_size], the input of the first layer."""
        ...

    def logits(self, normed: Tensor) -> Tensor:
        """Apply the head: hidden states after the final norm [R, hidden_size] -> [R, vocab_size] fp32."""
        ...

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Return the head's weights of some tokens: [n] int64 -> [n, hidden_size]."""
        ...


class DraftHead(Protocol):
    """A small network on the target's hidden states that predicts one token further than the target.

    Row i, at position i, reads token x[i + 1] and a state of token x[i], and predicts x[i + 2], as in
    EAGLE (arXiv 2401.15077) and in DeepSeek-V3's multi-token prediction (arXiv 2412.19437).
    """

    needs: tuple[str, ...]  # the target's hidden states that it reads, as in `ForwardBatch.features`
    kv_specs: list[LayerKVSpec]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int  # tokens, as its own configuration allows
    target_ids: Tensor | None  # the target's token of each logit, [V] int64; None if V is its vocabulary
    chains: NativeChains | None  # drafts the same tokens greedily in one call; None where the kernels cannot

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Fuse the hidden states that it `needs`, [T, hidden_size of the target] each -> states [T, width]."""
        ...

    def forward(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Compute a packed pass: [T] int64, [T, width], [T] int64 -> outputs [T, hidden_size]."""
        ...

    def states(self, outputs: Tensor) -> Tensor:
        """Turn outputs [R, hidden_size] into states [R, width], which are read with the tokens drafted from them."""
        ...

    def logits(self, outputs: Tensor) -> Tensor:
        """Apply norm and head: outputs [R, hidden_size] -> [R, V] fp32."""
        ...


class SharesOut(Protocol):
    """The processes that compute a target, which can compute a drafter's layers and head as well."""

    num_ranks: int
    num_kv_heads: int  # of the target, in all processes that share a memory: one that two of them hold counts twice

    def target(self, model: Any) -> Any:
        """The target, a `Decoder`, as such a drafter calls it: with logits that all processes compute."""
        ...

    def layers(self, layers: Layers, config: DecoderConfig) -> Layers:
        """Hand out a drafter's layers; what is returned has all processes compute what `layers` computes.

        Raises:
            ConfigError: they cannot be shared out among so many processes.
        """
        ...

    def head(self, head: Head | PackedHead) -> Head | PackedHead:
        """Hand out a drafter's head, like `layers`."""
        ...


@dataclass(frozen=True, slots=True)
class MaskToken:
    """The token that drafters which predict several tokens in one pass read in place of tokens not known yet.

    Attributes:
        token_id: the mask token.
        state: the hidden state [width] that is read with it, or None for drafters that read tokens only.
    """

    token_id: int
    state: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A target model and all that belongs to it.

    Attributes:
        model: the model itself.
        attention: the attention that it computes with.
        tokenizer: None where requests give token ids only.
        eos_token_ids: the tokens that end a text.
        path: the folder or file that it was loaded from, or None if it was made in memory.
        load_format: how it was, one of `LOADERS`; where it drafts for itself it is loaded so once more.
        kernels: the native kernels that its weights are packed for, or None if torch computes.
        on_device: makes the parts of drafters, where functions of `ops.cuda` compute the target; else None.
        make_cache: makes its KV caches, as `KVCache` does; other processes may hold a part of them.
        ranks: the processes that compute it, where there are several.
        drafter_ranks: where a drafter is loaded, the processes that compute it; None: this one alone.
        used_before: bytes of its GPU that others, the driver among them, used before it was loaded; 0 on a CPU.
    """

    model: TargetModel
    attention: Attention = field(default_factory=PagedAttention)
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    path: Path | None = None
    load_format: str = "auto"
    kernels: Kernels | None = None
    on_device: DeviceParts | None = None
    make_cache: Callable[..., KVCache] = KVCache
    ranks: SharesOut | None = None
    drafter_ranks: SharesOut | None = None
    used_before: int = 0

    def attention_for(self, kv_specs: Iterable[LayerKVSpec]) -> Attention:
        """How a drafter attends whose layers have KV of these sizes."""
        if self.on_device is not None:
            return self.on_device.attention()
        return choose_attention(kv_specs, self.kernels)

    def fingerprint(self) -> str:
        """Which model it is: the fingerprint of its files, or of its head's first rows if it was made in memory."""
        if self.path is not None:
            return fingerprint_of_files(self.path)
        token_ids = torch.arange(min(NUM_HEAD_ROWS, self.model.vocab_size), device=self.model.device)
        rows = self.model.head_rows(token_ids).to(dtype=torch.float32, device="cpu").contiguous()
        return hashlib.sha256(rows.numpy().tobytes()).hexdigest()

    def for_drafter(self, num_ranks: int) -> LoadedTarget:
        """The target as a drafter gets it that `num_ranks` processes compute.

        Raises:
            ConfigError: it may be 1 or as many as compute the target.
        """
        if num_ranks == 1:
            return self
        check_draft_ranks(num_ranks, 1 if self.ranks is None else self.ranks.num_ranks)
        assert self.ranks is not None
        return replace(self, model=self.ranks.target(self.model), drafter_ranks=self.ranks)


def check_draft_ranks(num_ranks: int, most: int) -> None:
    """Raise `ConfigError` where a drafter shall be computed by another number of processes than 1 or the target's `most`."""
    if num_ranks not in (1, most):
        raise ConfigError(
            f"draft_tensor_parallel_size: got {num_ranks}; may be "
            + ("1, as tensor_parallel_size is 1" if most == 1 else f"1 or {most}, which is tensor_parallel_size")
        )


def choose_attention(kv_specs: Iterable[LayerKVSpec], kernels: Kernels | None) -> Attention:
    """Choose the native kernels' attention if they can compute keys of these sizes, else torch's."""
    return NativeAttention(kernels) if kernels and can_attend(kv_specs) else PagedAttention()
