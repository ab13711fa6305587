"""IBM's MLP speculator: a recurrence over the target's last hidden state and the drafted tokens (arXiv 2404.19124)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.integers import is_integer
from forerun.errors import ModelError
from forerun.models.base import LoadedTarget
from forerun.models.heads.reader import HeadReader
from forerun.models.model_folder import CONFIG_FILE
from forerun.ops.layers import Embedding, Linear

NORM_EPS = 1e-6

Part = TypeVar("Part")


def load_mlp_speculator(folder: Path, target: LoadedTarget, *, quantization: str | None = None) -> MLPSpeculator:
    """Load a published MLP speculator; `quantization` as for `HeadReader`.

    Raises:
        ModelError: files or tensors are missing, surplus, damaged, or do not fit the target.
    """
    rename = methodcaller("removeprefix", "speculator.")
    with HeadReader.open(folder, target, rename=rename, quantization=quantization) as reader:
        return MLPSpeculator(reader)


class MLPSpeculator:
    """State i + 1 = GELU(norm_i(P_i state i + a E_i[token])), from which head i predicts the token after that one.

    State 0 is the target's hidden state of the last but one committed token, token 0 the last one.
    a = sqrt((1 - w^2) inner_dim / 2) / w with w = 0.5^(1 / 2n): after n steps half of the variance is from state 0.
    """

    needs: tuple[str, ...] = ("last_hidden",)
    target_ids: Tensor | None = None

    def __init__(self, reader: HeadReader) -> None:
        content, model = reader.content, reader.target.model
        self.num_steps = steps = _positive(content, "n_predict")
        width, vocab_size = _positive(content, "emb_dim"), _positive(content, "vocab_size")
        if (width, vocab_size) != (model.hidden_size, model.vocab_size):
            raise ModelError(
                f"MLP speculator: has emb_dim {width} and vocab_size {vocab_size}, the target hidden_size "
                f"{model.hidden_size} and vocab_size {model.vocab_size}; use one that was trained for this target"
            )
        inner = _positive(content, "inner_dim") if content.get("inner_dim") else width
        state_weight = 0.5 ** (0.5 / steps)
        self._token_weight = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight
        self._scales_input = bool(content.get("scale_input"))
        dtype = reader.stream_dtype
        tied = 0 if content.get("tie_weights") else None

        def embedding(weight: Tensor) -> Embedding:
            return Embedding(weight, dtype=dtype)

        def projection(weight: Tensor) -> Callable[[Tensor], Tensor]:
            return reader.packed(Linear(weight))

        def vector(weight: Tensor) -> Tensor:
            return weight.to(dtype)

        projected = [(inner, width), *[(inner, inner)] * (steps - 1)]
        self._embeddings = _read(reader, "emb.{}.weight", [(vocab_size, inner)] * steps, embedding, tied_after=tied)
        self._projections = _read(
            reader, "proj.{}.weight", projected, projection, tied_after=1 if content.get("tie_weights") else None
        )
        self._norms = _read(reader, "ln.{}.weight", [(inner,)] * steps, vector, tied_after=tied)
        self._shifts = _read(reader, "ln.{}.bias", [(inner,)] * steps, vector, tied_after=tied)
        self._heads = _read(
            reader, "head.{}.weight", [(vocab_size, inner)] * steps, reader.packed_head, tied_after=tied
        )
        self._stream_dtype = dtype
        reader.finish()

    def begin(self, hidden: Tensor) -> Tensor:
        """Make state 0 of the target's last hidden states: [R, hidden_size] -> [R, hidden_size]."""
        hidden = hidden.to(self._stream_dtype)
        if not self._scales_input:
            return hidden
        return F.rms_norm(hidden, hidden.shape[-1:], eps=NORM_EPS) / math.sqrt(2)

    def step(self, index: int, token_ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute step `index`: tokens [R], states [R, width] -> logits [R, vocab_size] fp32, states [R, inner_dim]."""
        mixed = self._projections[index](states) + self._token_weight * self._embeddings[index](token_ids)
        normed = F.rms_norm(mixed, mixed.shape[-1:], self._norms[index], NORM_EPS) + self._shifts[index]
        states = F.gelu(normed)
        return self._heads[index](states), states


def _positive(content: Mapping[str, Any], key: str) -> int:
    value = content.get(key)
    if not is_integer(value) or value < 1:
        raise ModelError(
            f"{CONFIG_FILE} of the head: {key}: got {value!r}; must be an integer of 1 or more; use an MLP speculator's checkpoint"
        )
    return value


def _read(
    reader: HeadReader,
    name: str,
    shapes: Sequence[tuple[int, ...]],
    make: Callable[[Tensor], Part],
    *,
    tied_after: int | None,
) -> list[Part]:
    """Read a part for each step; those after step `tied_after` may be stored once, with it, and equal ones are kept once."""
    parts: list[Part] = []
    last: Tensor | None = None
    for step, shape in enumerate(shapes):
        key = name.format(step)
        if tied_after is not None and step > tied_after and key not in reader.weights:
            parts.append(parts[-1])
            continue
        weight = reader.weights.tensor(key, shape)
        parts.append(parts[-1] if last is not None and torch.equal(weight, last) else make(weight))
        last = weight
    return parts
