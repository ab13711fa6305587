"""Reads a DFlash checkpoint's configuration and mask, in the layouts of its authors and of speculators."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ModelError, one_line
from forerun.models.base import TargetModel
from forerun.models.config import DecoderConfig
from forerun.models.model_folder import CONFIG_FILE
from forerun.models.weights import Checkpoint

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


def read_flags(content: Mapping[str, Any], target: TargetModel) -> DFlashFlags:
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


def causal_layers(content: Mapping[str, Any], windows: Sequence[int | None]) -> tuple[bool, ...]:
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


class DeinterleavedCheckpoint:
    """A `Checkpoint` trained with interleaved rotary pairs (dimensions 2i and 2i + 1), permuted to the order of `rotate`.

    Queries and keys are permuted alike, so that their products stay the same.
    """

    ROTATED = re.compile(r".*\.self_attn\.[qk]_(proj\.(weight|bias)|norm\.weight)")

    def __init__(self, checkpoint: Checkpoint, *, head_dim: int) -> None:
        self._checkpoint = checkpoint
        self._half = head_dim // 2

    def names(self) -> frozenset[str]:
        """See `Checkpoint`."""
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint`."""
        return self._checkpoint.shape(name)

    def load(self, name: str) -> Tensor:
        """See `Checkpoint`."""
        tensor = self._checkpoint.load(name)
        if not self.ROTATED.fullmatch(name):
            return tensor
        return tensor.view(-1, self._half, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def check_target(content: Mapping[str, Any], config: DecoderConfig, model: TargetModel) -> None:
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
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(
            f"{CONFIG_FILE} of the head: {key}: got {value!r}; must be an integer; use a DFlash checkpoint"
        )
    return value


def read_mask(folder: Path, content: Mapping[str, Any], *, width: int) -> Tensor | None:
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
