"""A model that is ready to compute, with all that belongs to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from forerun.core.batch import LayerKVSpec
from forerun.models.base import TargetModel
from forerun.models.tokenizer import Tokenizer
from forerun.ops.attention.base import Attention
from forerun.ops.attention.paged import PagedAttention
from forerun.ops.native.attention import NativeAttention, can_attend
from forerun.ops.native.library import Kernels


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
