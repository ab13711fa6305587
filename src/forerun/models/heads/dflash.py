"""DFlash's head: predicts a block of masks in one pass, over keys and values projected from the target's hidden states (arXiv 2602.06036).

Published layouts: the authors' (`dflash_config`) and speculators' (`transformer_layer_config`). Its layers
are Qwen3's, whatever the target is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.core.batch import LayerKVSpec
from forerun.core.integers import is_integer
from forerun.errors import ModelError, one_line
from forerun.kv.cache import LayerKV
from forerun.models.base import LoadedTarget, TargetModel
from forerun.models.checkpoint import Checkpoint, dense, open_checkpoint, renamed
from forerun.models.config import DecoderConfig
from forerun.models.heads.reader import HeadReader, head_config, read_target_ids
from forerun.models.model_folder import CONFIG_FILE, read_json
from forerun.ops.attention import Attend
from forerun.ops.layers import RMSNorm
from forerun.ops.rotary import rotate

MASK_FILE = "mask_embedding.pt"

NOT_COVERED: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_swa": (False,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1.0,),
}
"""Keys of variants that the head does not cover -> the values that mean no variant, as an absent key does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashFlags:
    """A checkpoint's configuration, apart from its layers'.

    Attributes:
        layers: the N of the target's hidden states "hidden.N", in the order in which `fc` reads them.
        mask_token_id: the token of rows to be predicted.
        block_size: rows of a block: the anchor, which is the last token of the text, then masks.
        sample_from_anchor: whether each row predicts the token after it, the anchor too. If not, masks
            predict the token of their own position, and the anchor's output is not used.
    """

    layers: tuple[int, ...]
    mask_token_id: int
    block_size: int
    sample_from_anchor: bool = False


def load_dflash(folder: Path, target: LoadedTarget, *, quantization: str | None = None) -> DFlashHead:
    """Load a published DFlash checkpoint; `quantization` as for `HeadReader`.

    Raises:
        ModelError: files or tensors are missing, surplus, damaged, or do not fit the target.
    """
    content = read_json(folder / CONFIG_FILE)
    kind = content.get("speculators_model_type", "dflash")
    if kind != "dflash":
        raise ModelError(
            f"{CONFIG_FILE} of the head: speculators_model_type: got {kind!r}; must be 'dflash'; set the method that it is of"
        )
    return build_dflash(content, open_checkpoint(folder), target, folder=folder, quantization=quantization)


def build_dflash(
    content: Mapping[str, Any],
    checkpoint: Checkpoint,
    target: LoadedTarget,
    *,
    folder: Path | None = None,
    quantization: str | None = None,
) -> DFlashHead:
    """Build the head from the content of config.json and its tensors; `folder` may hold the mask's embedding in a file of its own.

    Raises:
        ModelError: tensors are missing, surplus, damaged, or do not fit the target.
    """
    content = {**content, **(content.get("transformer_layer_config") or {}), **(content.get("dflash_config") or {})}
    config = replace(
        head_config(content, architecture="Qwen3ForCausalLM", max_model_len=target.model.max_model_len), root=""
    )
    checkpoint = renamed(checkpoint, lambda name: name.removeprefix("model."))
    if content.get("is_neox_style") is False:
        checkpoint = DeinterleavedCheckpoint(checkpoint, head_dim=config.head_dim)
    mask = None if folder is None else _read_mask(folder, content, width=config.hidden_size)
    return DFlashHead(HeadReader(content, checkpoint, target, quantization=quantization), config, mask=mask)


class DFlashHead:
    """Rows of a block attend to each other and to the context, whose keys and values are projected hidden states.

    A position's KV entry is computed from the target's hidden states of that position and from no token,
    so it depends on the text up to there only.
    """

    def __init__(self, reader: HeadReader, config: DecoderConfig, *, mask: Tensor | None) -> None:
        model, content = reader.target.model, reader.content
        _check_target(content, config, model)
        self.flags = flags = _read_flags(content, model)
        self.needs = tuple(f"hidden.{layer}" for layer in flags.layers)
        self.dtype, self.device = model.dtype, model.device
        self.max_model_len = config.max_model_len
        self.max_tokens = flags.block_size - (not flags.sample_from_anchor)  # in a draft
        self._config = config
        causal = _causal_layers(content, config.windows)
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


def _read_flags(content: Mapping[str, Any], target: TargetModel) -> DFlashFlags:
    """Resolve config.json, whose nested parts have been merged into `content`.

    Raises:
        ModelError: a key is missing or out of range, or is of a variant that is not covered.
    """
    for key, neutral in NOT_COVERED.items():
        if content.get(key) not in (None, *neutral):
            raise ModelError(
                f"{CONFIG_FILE} of the head: {key}: got {content[key]!r}, which is not covered; use another head"
            )
    own, others = content.get("aux_hidden_state_layer_ids"), content.get("target_layer_ids")
    # the authors count layers' outputs from 0, speculators their inputs: the output of layer 0 is the input of layer 1
    layers = own if own is not None else [_integer("target_layer_ids", layer) + 1 for layer in others or ()]
    if not layers:
        raise ModelError(
            f"{CONFIG_FILE} of the head: has neither target_layer_ids nor aux_hidden_state_layer_ids; use a DFlash checkpoint"
        )
    for layer in layers:
        if not 0 <= _integer("aux_hidden_state_layer_ids", layer) < target.num_layers:
            raise ModelError(
                f"{CONFIG_FILE} of the head: reads the residual stream before layer {layer}; must be from 0 to "
                f"{target.num_layers - 1} for this target; use a head that was trained for it"
            )
    block_size = _integer("block_size", content.get("block_size"))
    if block_size < 2:
        raise ModelError(f"{CONFIG_FILE} of the head: block_size: got {block_size}; must be 2 or more; mend it")
    mask_token_id = _integer("mask_token_id", content.get("mask_token_id"))
    if not 0 <= mask_token_id < target.vocab_size:
        raise ModelError(
            f"{CONFIG_FILE} of the head: mask_token_id: got {mask_token_id}; must be from 0 to {target.vocab_size - 1}; "
            "use a head that was trained for this target"
        )
    return DFlashFlags(
        layers=tuple(layers),
        mask_token_id=mask_token_id,
        block_size=block_size,
        sample_from_anchor=bool(content.get("sample_from_anchor")),
    )


def _causal_layers(content: Mapping[str, Any], windows: Sequence[int | None]) -> tuple[bool, ...]:
    """Return for each layer whether rows of a block see only those before them: by default if it has a window.

    Raises:
        ModelError: a layer has a window and sees the whole block.
    """
    named = content.get("is_causal", content.get("causal"))
    if named is not None:
        found = (bool(named),) * len(windows)
    else:
        found = tuple(window is not None and not content.get("sliding_window_non_causal") for window in windows)
    if any(window is not None and not causal for window, causal in zip(windows, found, strict=True)):
        raise ModelError(
            f"{CONFIG_FILE} of the head: layers of sliding attention that see later rows are not covered; must be causal; "
            "use another head"
        )
    return found


def _check_target(content: Mapping[str, Any], config: DecoderConfig, model: TargetModel) -> None:
    """Check that a checkpoint is for this target, by the keys that it has.

    Raises:
        ModelError: it is for another target.
    """
    expected = {
        "num_target_layers": (content.get("num_target_layers"), model.num_layers),
        "target_hidden_size": (content.get("target_hidden_size"), model.hidden_size),
        "vocab_size": (config.vocab_size, model.vocab_size),
    }
    for key, (value, own) in expected.items():
        if value not in (None, own):
            raise ModelError(
                f"{CONFIG_FILE} of the head: {key}: got {value}, this target has {own}; use a head that was trained for "
                "this target"
            )


def _integer(key: str, value: Any) -> int:
    if not is_integer(value):
        raise ModelError(
            f"{CONFIG_FILE} of the head: {key}: got {value!r}; must be an integer; use a DFlash checkpoint"
        )
    return value


def _read_mask(folder: Path, content: Mapping[str, Any], *, width: int) -> Tensor | None:
    """Read the mask's own embedding [width], or return None if it is the mask token's.

    Raises:
        ModelError: the file is damaged, of another width or of another mask token.
    """
    file = folder / MASK_FILE
    if not file.exists():
        return None
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(f"{file}: cannot be read ({one_line(error)}); download it again") from error
    if isinstance(found, Mapping):
        own, stored = content.get("mask_token_id"), found.get("mask_token_id")
        if stored not in (None, own):
            raise ModelError(f"{file}: is of mask token {stored}, the head's is {own}; download both again")
        found = found.get("embedding")
    if not isinstance(found, Tensor):
        raise ModelError(f"{file}: got a {type(found).__name__}; must be a tensor, or hold one as 'embedding'")
    if found.numel() != width:
        raise ModelError(
            f"{file}: has {found.numel()} values; must be {width}, the head's hidden_size; download both again"
        )
    return found.flatten()


class DeinterleavedCheckpoint:
    """A `Checkpoint` trained with interleaved rotary pairs (dimensions 2i and 2i + 1), permuted to the order of `rotate`.

    Queries and keys are permuted alike, so that their products stay the same.
    """

    ROTATED = re.compile(r".*\.self_attn\.[qk]_(proj\.(weight|bias)|norm\.weight)")

    def __init__(self, checkpoint: Checkpoint, *, head_dim: int) -> None:
        self._checkpoint = checkpoint
        self._half = head_dim // 2
        self.facts = replace(checkpoint.facts, is_mixed=False)

    def names(self) -> frozenset[str]:
        """See `Checkpoint`."""
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint`."""
        return self._checkpoint.shape(name)

    def load(self, name: str) -> Tensor:
        """See `Checkpoint`."""
        tensor = dense(self._checkpoint.load(name))
        if not self.ROTATED.fullmatch(name):
            return tensor
        return tensor.view(-1, self._half, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
