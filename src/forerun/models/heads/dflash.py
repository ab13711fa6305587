"""DFlash's head: predicts a block of masks in one pass, over keys and values projected from the target's hidden states (arXiv 2602.06036).

Published layouts: the authors' (`dflash_config`) and speculators' (`transformer_layer_config`). Its layers
are Qwen3's, whatever the target is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.core.batch import LayerKVSpec
from forerun.errors import ModelError
from forerun.kv.cache import LayerKV
from forerun.models.base import LoadedTarget
from forerun.models.checkpoint import open_checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.heads.dflash_checkpoint import (
    DeinterleavedCheckpoint,
    causal_layers,
    check_target,
    read_flags,
    read_mask,
)
from forerun.models.heads.reader import HeadReader, head_config, read_target_ids
from forerun.models.model_folder import CONFIG_FILE, read_json
from forerun.models.weights import Checkpoint, renamed
from forerun.ops.attention.base import Attend
from forerun.ops.layers import RMSNorm
from forerun.ops.rotary import rotate


def load_dflash(folder: Path, target: LoadedTarget) -> DFlashHead:
    """Load a published DFlash checkpoint.

    Raises:
        ModelError: files or tensors are missing, surplus, damaged, or do not fit the target.
    """
    content = read_json(folder / CONFIG_FILE)
    kind = content.get("speculators_model_type", "dflash")
    if kind != "dflash":
        raise ModelError(
            f"{CONFIG_FILE} of the head: speculators_model_type: got {kind!r}; must be 'dflash'; set the method that it is of"
        )
    return build_dflash(content, open_checkpoint(folder), target, folder=folder)


def build_dflash(
    content: Mapping[str, Any], checkpoint: Checkpoint, target: LoadedTarget, *, folder: Path | None = None
) -> DFlashHead:
    """The head of a config.json and its tensors; `folder` may hold a mask's embedding in a file of its own.

    Raises:
        ModelError: tensors are missing, surplus, damaged, or do not fit the target.
    """
    content = {**content, **(content.get("transformer_layer_config") or {}), **(content.get("dflash_config") or {})}
    config = replace(head_config(content, architecture="Qwen3ForCausalLM"), root="")
    checkpoint = renamed(checkpoint, lambda name: name.removeprefix("model."))
    if content.get("is_neox_style") is False:
        checkpoint = DeinterleavedCheckpoint(checkpoint, head_dim=config.head_dim)
    mask = None if folder is None else read_mask(folder, content, width=config.hidden_size)
    return DFlashHead(HeadReader(content, checkpoint, target), config, mask=mask)


class DFlashHead:
    """Rows of a block attend to each other and to the context, whose keys and values are projected hidden states.

    A position's KV entry is computed from the target's hidden states of that position and from no token,
    so it depends on the text up to there only.
    """

    def __init__(self, reader: HeadReader, config: DecoderConfig, *, mask: Tensor | None) -> None:
        model, content = reader.target.model, reader.content
        check_target(content, config, model)
        self.flags = flags = read_flags(content, model)
        self.needs = tuple(f"hidden.{layer}" for layer in flags.layers)
        self.dtype, self.device = model.dtype, model.device
        self.max_model_len = config.max_model_len
        self.max_tokens = flags.block_size - (not flags.sample_from_anchor)  # in a draft
        self._config = config
        causal = causal_layers(content, config.windows)
        self.has_causal_layers = any(causal)
        self._layer_groups = [
            (is_causal, list(alike)) for is_causal, alike in groupby(range(config.num_layers), key=causal.__getitem__)
        ]
        spec = LayerKVSpec(num_kv_heads=config.num_kv_heads, key_dim=config.head_dim, value_dim=config.head_dim)
        self.kv_specs = [spec] * config.num_layers
        self._stream_dtype = reader.stream_dtype
        width = config.hidden_size
        self._fc = reader.linear("fc", width, len(flags.layers) * model.hidden_size)
        self._hidden_norm = reader.norm("hidden_norm", width, config.norm_eps)
        self._read_context(reader)
        self._embed = reader.embedding(width=width)
        self._mask = None if mask is None else mask.to(self.device, self._stream_dtype)
        self._layers = reader.layers(config)
        self._rotations = reader.rotations(config)
        self._norm = reader.norm("norm", width, config.norm_eps)
        num_draft = content.get("draft_vocab_size") or model.vocab_size
        self.target_ids = read_target_ids(reader, num_draft=num_draft)
        self._head = reader.head(outputs=num_draft, width=width)
        reader.weights.finish(("verifier_",))  # the trainer's copies of the target's final norm and head

    def _read_context(self, reader: HeadReader) -> None:
        """Read the key and value projections of all layers as one: a small copy, as layers keep theirs fused with the query's."""
        config = self._config
        indices = range(config.num_layers)
        names = [f"layers.{index}.self_attn.{kind}_proj" for index in indices for kind in ("k", "v")]
        rows = [config.num_kv_heads * config.head_dim] * len(names)
        linear = reader.weights.linear(names, rows, width=config.hidden_size, bias=config.qkv_bias)
        self._keys_and_values = reader.packed(linear)
        norms = [
            reader.weights.tensor(
                f"layers.{index}.self_attn.k_norm.weight", (config.head_dim,), dtype=self._stream_dtype
            )
            for index in indices
        ]
        self._key_norm = RMSNorm(torch.stack(norms).repeat_interleave(config.num_kv_heads, dim=0), config.norm_eps)

    def context(self, features: Sequence[Tensor], positions: Tensor) -> list[LayerKV]:
        """Compute the KV entries of a context.

        Args:
            features: the hidden states that it `needs`, in that order, [T, hidden_size of the target] each.
            positions: [T] int64

        Returns:
            Keys and values of each layer, [T, num_kv_heads, head_dim].
        """
        config = self._config
        states = self._hidden_norm(self._fc(torch.cat(list(features), dim=-1).to(self._stream_dtype)))
        both = self._keys_and_values(states)
        both = both.view(len(positions), config.num_layers, 2, config.num_kv_heads, config.head_dim)
        keys, values = both.unbind(dim=2)
        rotation = self._rotations(positions)[-1]
        assert rotation is not None, "Qwen3's layers have a rope"
        rotated = rotate(self._key_norm(keys.flatten(1, 2)), rotation).view(keys.shape)
        return [LayerKV(rotated[:, index], values[:, index]) for index in range(config.num_layers)]

    def block(self, anchor: int, num_tokens: int) -> list[int]:
        """Return the rows after a text that ends in `anchor`; their last `num_tokens` outputs draft as many tokens."""
        return [anchor] + [self.flags.mask_token_id] * (num_tokens - self.flags.sample_from_anchor)

    def forward(self, token_ids: Tensor, positions: Tensor, whole: Attend, causal: Attend) -> Tensor:
        """Compute blocks after their texts; rows see all rows of their block in `whole`, those up to them in `causal`.

        [T] int64, [T] int64 -> outputs [T, hidden_size]
        """
        hidden = self._embed(token_ids).to(self._stream_dtype)
        if self._mask is not None:
            hidden = torch.where((token_ids == self.flags.mask_token_id)[:, None], self._mask, hidden)
        rotations = self._rotations(positions)
        for is_causal, layers in self._layer_groups:
            hidden = self._layers(hidden, rotations, causal if is_causal else whole, layers[0], layers[-1] + 1)
        return hidden

    def logits(self, outputs: Tensor) -> Tensor:
        """Apply norm and head: outputs [R, hidden_size] -> [R, V] fp32."""
        return self._head(self._norm(outputs))
