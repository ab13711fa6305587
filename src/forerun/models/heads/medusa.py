"""Medusa's heads: each predicts a token one further ahead from the target's last hidden state (arXiv 2401.10774).

Published layouts: the authors' (`0.0.linear` and `0.1` are head 0's block and vocabulary) and vLLM's
(`blocks.0.layers.0`, `lm_heads.0`, perhaps `token_map`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.base import LoadedTarget
from forerun.models.checkpoint import SafetensorsCheckpoint, open_checkpoint, renamed
from forerun.models.heads.reader import HeadReader, read_token_map
from forerun.models.layers import Product
from forerun.models.model_folder import CONFIG_FILE, read_json

HEADS_FILE = "medusa_lm_head.safetensors"

RENAMES = (
    (r"^medusa_heads?\.", ""),
    (r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear."),
    (r"^lm_heads\.(\d+)\.", r"\1.lm_head."),
    (r"^(\d+)\.\d+\.weight$", r"\1.lm_head.weight"),
)


def load_medusa(folder: Path, target: LoadedTarget, *, quantization: str | None = None) -> MedusaHeads:
    """Load published Medusa heads, from medusa_lm_head.safetensors or model.safetensors; `quantization` as for `HeadReader`.

    Raises:
        ModelError: files or tensors are missing, surplus, damaged, or do not fit the target.
    """
    heads_file = folder / HEADS_FILE
    checkpoint = SafetensorsCheckpoint([heads_file]) if heads_file.exists() else open_checkpoint(folder)
    content = read_json(folder / CONFIG_FILE)
    return MedusaHeads(HeadReader(content, renamed(checkpoint, canonical_name), target, quantization=quantization))


def canonical_name(name: str) -> str:
    """Return I.J.linear.* for a tensor of head I's block J, I.lm_head.weight for its vocabulary's."""
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


class MedusaHeads:
    """Head i: residual blocks x + SiLU(W x + b), then a vocabulary; it predicts the token at depth i + 1 of a draft.

    The numbers of heads and blocks are read from the tensors, as config.json is often wrong about them.
    """

    needs: tuple[str, ...] = ("last_hidden",)

    def __init__(self, reader: HeadReader) -> None:
        model = reader.target.model
        self.num_heads = _count(reader, "{}.0.linear.weight")
        if not self.num_heads:
            raise ModelError(
                "checkpoint: has no Medusa heads, such as tensor '0.0.linear.weight'; use the method that it was trained for"
            )
        width = reader.weights.shape("0.0.linear.weight")[-1]
        if width != model.hidden_size:
            raise ModelError(
                f"Medusa heads: are for a target of hidden_size {width}, this one has {model.hidden_size}; use heads that "
                "were trained for it"
            )
        self.target_ids: Tensor | None = read_token_map(reader)
        self._stream_dtype = reader.stream_dtype
        self._logit_scale = float(reader.content.get("logit_scale") or 1.0)
        self._blocks = _read_blocks(reader, self.num_heads)
        self._vocabularies = _read_vocabularies(reader, self.num_heads, self.target_ids)
        reader.finish()

    def logits(self, hidden: Tensor, *, count: int) -> list[Tensor]:
        """Compute the first `count` heads: last hidden states [R, hidden_size] -> [R, V] fp32 of each."""
        hidden = hidden.to(self._stream_dtype)
        states = [self._state(blocks, hidden) for blocks in self._blocks[:count]]
        vocabularies = self._vocabularies[:count]
        if all(vocabulary is vocabularies[0] for vocabulary in vocabularies):
            logits = list(vocabularies[0](torch.cat(states)).chunk(len(states)))  # one product reads the weights once
        else:
            logits = [vocabulary(state) for vocabulary, state in zip(vocabularies, states, strict=True)]
        return logits if self._logit_scale == 1.0 else [own * self._logit_scale for own in logits]

    def _state(self, blocks: list[Product], hidden: Tensor) -> Tensor:
        for block in blocks:
            hidden = hidden + F.silu(block(hidden))
        return hidden


def _count(reader: HeadReader, name: str) -> int:
    """Return how many tensors the checkpoint has of those that `name` numbers from 0."""
    return next(i for i in itertools.count() if name.format(i) not in reader.weights)


def _read_blocks(reader: HeadReader, num_heads: int) -> list[list[Product]]:
    """Read each head's blocks; the authors tie the blocks of a head, and a file may store tied ones once."""
    width = reader.target.model.hidden_size
    num_stored = _count(reader, "0.{}.linear.weight")
    num_blocks = reader.content.get("medusa_num_layers", num_stored)
    if not isinstance(num_blocks, int) or num_blocks < 1 or num_stored not in (1, num_blocks):
        raise ModelError(
            f"{CONFIG_FILE} of the head: medusa_num_layers: got {num_blocks!r}, the checkpoint has {num_stored}; "
            "download the checkpoint again"
        )
    repeats = num_blocks // num_stored
    return [
        [reader.linear(f"{head}.{block}.linear", width, width) for block in range(num_stored)] * repeats
        for head in range(num_heads)
    ]


def _read_vocabularies(
    reader: HeadReader, num_heads: int, target_ids: Tensor | None
) -> list[Callable[[Tensor], Tensor]]:
    """Read each head's [R, hidden_size] -> [R, V] fp32: its own, one for all heads, or the target's if none is stored."""
    own = [f"{head}.lm_head.weight" for head in range(num_heads)]
    if own[0] in reader.weights and not reader.content.get("original_lm_head"):
        for name in own:
            if name not in reader.weights:
                raise ModelError(f"checkpoint: tensor {name!r} is missing, other heads have it; download it again")
        targets = reader.target.model.logits
        read = [_read_vocabulary(reader, name, target_ids) for name in own]
        return [targets if vocabulary == targets else vocabulary for vocabulary in read]
    common = own[0] if own[0] in reader.weights else "lm_head.weight"
    return [_read_vocabulary(reader, common, target_ids)] * num_heads


def _read_vocabulary(reader: HeadReader, name: str, target_ids: Tensor | None) -> Callable[[Tensor], Tensor]:
    model, weights = reader.target.model, reader.weights
    stored = weights.shape(name)[0] if name in weights else model.vocab_size
    if stored != model.vocab_size and (target_ids is None or stored != len(target_ids)):
        raise ModelError(
            f"Medusa heads: are for a vocabulary of {stored} tokens, the target has {model.vocab_size}; use heads that "
            "were trained for it"
        )
    if target_ids is None:
        return reader.head(name, outputs=model.vocab_size, width=model.hidden_size)
    if name not in weights:
        return reader.packed_head(model.head_rows(target_ids).to(model.dtype))
    weight = weights.tensor(name, (stored, model.hidden_size))
    return reader.packed_head(weight if stored == len(target_ids) else weight[target_ids])
