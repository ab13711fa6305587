"""EAGLE-3's head: one wide decoder layer on hidden states of three depths of the target (arXiv 2503.01840).

P-EAGLE (arXiv 2602.01469) is the same head with a learned state for positions whose hidden states are not
known yet, so that one pass drafts all tokens.

Published layouts: the authors' and SpecForge's (`midlayer`), and speculators' (`layers.0`,
`transformer_layer_config`). Flags of the configuration name what a checkpoint computes differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.core.batch import LayerKVSpec
from forerun.errors import ModelError
from forerun.models.base import LoadedTarget, MaskToken
from forerun.models.checkpoint import WeightReader
from forerun.models.config import DecoderConfig
from forerun.models.config_file import read_mask_token
from forerun.models.decoder import Decoder
from forerun.models.heads.reader import HeadReader, head_config, read_target_ids
from forerun.models.layers import Norm, WideLayer, read_attention, read_layer, read_mlp, read_norm, unchanged
from forerun.ops.attention import Attend
from forerun.ops.layers import Embedding, RMSNorm
from forerun.ops.native.chains import ChainHeadParts, NativeChains
from forerun.ops.native.layers import NativeLayers, NativeRMSNorm, PackedEmbedding, PackedHead, PackedLinear

MASK = "mask_hidden"
"""The learned features of places that are not known yet; heads of P-EAGLE have them."""

DRAFTS_BOTH = "trained_step_by_step"
"""The key of config.json by which a head with `MASK` says that it was trained as EAGLE-3 too; forerun's own."""

NUM_INDUCTION_HEADS = "num_induction_heads"
"""The key of config.json for how many of its last attention heads began as induction heads; forerun's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Flags:
    """How a checkpoint differs from the paper's head.

    Attributes:
        layer_ids: the N of the target's hidden states "hidden.N" that it reads.
        norm_before_residual: the residual stream starts from the normed state.
        norm_before_fc: one norm over all hidden states before `fc`.
        fc_norm: a norm for each of them.
        norm_output: the next state is the output after the final norm (EAGLE 3.1).
        use_aux_hidden_state: if False, the target's last hidden state is the state, without `fc`.
        logit_scale: multiplies the logits.
    """

    layer_ids: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    use_aux_hidden_state: bool = True
    logit_scale: float = 1.0


def load_eagle3(folder: Path, target: LoadedTarget, *, quantization: str | None = None) -> Eagle3Head:
    """Load a published EAGLE-3 checkpoint; `quantization` as for `HeadReader`.

    Raises:
        ModelError: files or tensors are missing, surplus, damaged, or do not fit the target.
    """
    with HeadReader.open(folder, target, rename=canonical_name, quantization=quantization) as reader:
        if MASK not in reader.weights:
            return Eagle3Head(reader)
        if not reader.content.get(DRAFTS_BOTH):
            raise ModelError("checkpoint: is of P-EAGLE; set method='peagle'")
        return PEagleHead(reader)


def load_peagle(folder: Path, target: LoadedTarget, *, quantization: str | None = None) -> PEagleHead:
    """Load a published P-EAGLE checkpoint; `quantization` as for `HeadReader`.

    Raises:
        ModelError: files or tensors are missing, surplus, damaged, or do not fit the target, or config.json names no mask token.
    """
    with HeadReader.open(folder, target, rename=canonical_name, quantization=quantization) as reader:
        return PEagleHead(reader)


def canonical_name(name: str) -> str:
    """Return the name that a tensor has in speculators' layout."""
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def read_flags(content: Mapping[str, Any], *, num_target_layers: int) -> Eagle3Flags:
    """Resolve config.json; flags stand at its top or in `eagle_config`.

    Raises:
        ModelError: a file of speculators leaves out norm_before_residual, for which its tools have different
            defaults, or a layer is not one of the target's.
    """
    nested = content.get("eagle_config") or {}

    def value(key: str, default: Any) -> Any:
        found = nested.get(key, content.get(key))
        return default if found is None else found

    if "speculators_model_type" in content and "norm_before_residual" not in content:
        raise ModelError(
            "config.json of the head: norm_before_residual is missing; its tools disagree on what that means: write "
            "true or false, as it was trained"
        )
    last = num_target_layers
    layer_ids = value("eagle_aux_hidden_state_layer_ids", None) or (2, last // 2, last - 3)
    for layer in layer_ids:
        if not isinstance(layer, int) or not 0 <= layer <= last:
            raise ModelError(
                f"config.json of the head: eagle_aux_hidden_state_layer_ids: got {layer!r}; must be from 0 to {last} for "
                "this target; use a head that was trained for it"
            )
    return Eagle3Flags(
        layer_ids=tuple(sorted(set(layer_ids))),
        norm_before_residual=bool(value("norm_before_residual", False)),
        norm_before_fc=bool(value("norm_before_fc", False)),
        fc_norm=bool(value("fc_norm", False)),
        norm_output=bool(value("norm_output", False)),
        use_aux_hidden_state=bool(value("use_aux_hidden_state", True)),
        logit_scale=float(value("logit_scale", 1.0)),
    )


class Eagle3Head:
    """State = fc(hidden states), a wide layer, perhaps more layers, a norm and a head over part of the vocabulary.

    The next state is the output before the final norm, or after it (`norm_output`).
    """

    def __init__(self, reader: HeadReader) -> None:
        model = reader.target.model
        content = {**reader.content, **(reader.content.get("transformer_layer_config") or {})}
        self.flags = flags = read_flags(content, num_target_layers=model.num_layers)
        config = replace(
            head_config(content, architecture=_architecture(content), max_model_len=model.max_model_len), root=""
        )
        self.dtype, self.device = model.dtype, model.device
        self.max_model_len = config.max_model_len
        spec = LayerKVSpec(num_kv_heads=config.num_kv_heads, key_dim=config.head_dim, value_dim=config.head_dim)
        self.kv_specs = [spec] * config.num_layers
        self._stream_dtype = reader.stream_dtype
        if flags.use_aux_hidden_state:
            self.needs = tuple(f"hidden.{layer}" for layer in flags.layer_ids)
        else:
            self.needs = ("last_hidden",)
        width = config.hidden_size
        self._read_fusion(reader, config)
        self._embed = reader.embedding(width=width)
        first = _read_wide_layer(reader.weights, config, starts_normed=flags.norm_before_residual)
        rest = [read_layer(reader.weights, config, index=index) for index in range(1, config.num_layers)]
        self._layers = reader.stack([first, *rest], config)
        self._rotations = reader.rotations(config)
        self._norm = reader.norm("norm", width, config.norm_eps)
        num_draft = content.get("draft_vocab_size") or model.vocab_size
        self.target_ids = read_target_ids(reader, num_draft=num_draft)
        self._head = reader.head(outputs=num_draft, width=width)
        reader.finish()
        self.chains = self._on_kernels(reader)

    def _read_fusion(self, reader: HeadReader, config: DecoderConfig) -> None:
        """Read `fc` and the norms before it."""
        flags, width, eps = self.flags, config.hidden_size, config.norm_eps
        target_width, count = reader.target.model.hidden_size, len(self.needs)
        asked = reader.content.get("target_hidden_size", target_width)
        asked = width if asked is None else asked  # speculators names it where it is not the head's own
        if asked != target_width:
            raise ModelError(
                f"EAGLE-3 head: is for a target of hidden_size {asked}, this one has {target_width}; use a head that "
                "was trained for this target"
            )
        self._norm_all: Norm | None = None
        self._norm_each: list[Norm] = []
        self._fc = None
        if not flags.use_aux_hidden_state:
            return
        if flags.norm_before_fc:
            self._norm_all = reader.norm("input_norm", count * target_width, eps)
        if flags.fc_norm:
            self._norm_each = [reader.norm(f"fc_norm.{i}", target_width, eps) for i in range(count)]
        self._fc = reader.linear("fc", width, count * target_width)

    def _on_kernels(self, reader: HeadReader) -> NativeChains | None:
        """Return the head as the kernels draft whole chains with it; None where a part of it is computed by torch."""
        model, kernels = reader.target.model, reader.target.kernels
        embedding, head, scale = self._embed, self._head, self.flags.logit_scale
        if isinstance(model, Decoder):
            embedding = model.embedding if embedding == model.embed else embedding
            head = model.head if head == model.logits else head
        norms = [*self._norm_each, *([] if self._norm_all is None else [self._norm_all])]
        native_norms = [norm for norm in norms if isinstance(norm, NativeRMSNorm)]
        if (
            kernels is None
            or reader.target.drafter_ranks is not None  # one process drafts a chain in one call, several pass by pass
            or not isinstance(embedding, (PackedEmbedding, Embedding))
            or not isinstance(head, PackedHead)
            or not isinstance(self._layers, NativeLayers)
            or not isinstance(self._norm, NativeRMSNorm)
            or len(native_norms) != len(norms)
            or not isinstance(self._fc, (PackedLinear, type(None)))
            or not _is_ascending(self.target_ids)  # as races among equals are decided by the target's order
            or (self._norm_all is not None and self._norm_each)
            or (scale != 1.0 and (head.scale != 1.0 or head.soft_cap is not None))
        ):
            return None
        parts = ChainHeadParts(
            embedding=embedding,
            fusion=self._fc,
            feature_norms=native_norms,
            features=self.needs,
            feature_width=model.hidden_size,
            layers=self._layers,
            rotaries=self._rotations.tables,
            norm=self._norm,
            vocabulary=head.linear,
            logit_factor=head.scale * scale,
            logit_cap=head.soft_cap or 0.0,
            target_ids=self.target_ids,
            feeds_normed=self.flags.norm_output,
        )
        return NativeChains(kernels, parts)

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """See `DraftHead`."""
        states = torch.cat(list(features), dim=-1).to(self._stream_dtype)
        return states if self._fc is None else self.project(states)

    def project(self, features: Tensor) -> Tensor:
        """Apply `fc`: concatenated hidden states [T, number of them * hidden_size of the target] -> states [T, width]."""
        assert self._fc is not None, "a head whose state is the last hidden state has no projection"
        if self._norm_all is not None:
            features = self._norm_all(features)
        if self._norm_each:
            parts = features.chunk(len(self._norm_each), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self._norm_each, parts, strict=True)], dim=-1)
        return self._fc(features)

    def forward(self, token_ids: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See `DraftHead`."""
        hidden = torch.cat([self._embed(token_ids).to(self._stream_dtype), states], dim=-1)
        return self._layers(hidden, self._rotations(positions), attend, 0, len(self.kv_specs))

    def states(self, outputs: Tensor) -> Tensor:
        """See `DraftHead`."""
        return self._norm(outputs) if self.flags.norm_output else outputs

    def normed(self, outputs: Tensor) -> Tensor:
        """Apply the final norm: outputs [R, hidden_size] -> what the LM head multiplies, [R, hidden_size]."""
        return self._norm(outputs)

    def logits(self, outputs: Tensor) -> Tensor:
        """See `DraftHead`."""
        logits = self._head(self.normed(outputs))
        return logits if self.flags.logit_scale == 1.0 else logits * self.flags.logit_scale


class PEagleHead(Eagle3Head):
    """P-EAGLE: EAGLE-3's head with a `mask`, whose state is `mask_hidden` after the norms and `fc`.

    `num_trained` is how many tokens it was trained to draft in a pass, or None if config.json does not name it.
    """

    mask: MaskToken

    def __init__(self, reader: HeadReader) -> None:
        if MASK not in reader.weights:
            raise ModelError(
                "checkpoint: has no mask_hidden, so it is not of P-EAGLE; if it is of EAGLE-3, set method='eagle3'"
            )
        super().__init__(reader)
        self.num_trained = _num_trained(reader.content)

    def _read_fusion(self, reader: HeadReader, config: DecoderConfig) -> None:
        super()._read_fusion(reader, config)
        count, model = len(self.needs), reader.target.model
        shape = reader.weights.shape(MASK)  # [1, 1, width] in speculators' layout, [1, width] in others
        if math.prod(shape) != count * model.hidden_size:
            raise ModelError(
                f"checkpoint: mask_hidden has shape {list(shape)}, the {count} features of the target are "
                f"{count * model.hidden_size} wide; use a head that was trained for this target"
            )
        features = reader.weights.tensor(MASK, shape).view(1, -1).chunk(count, dim=-1)
        state = self.fuse(features)[0]
        self.mask = MaskToken(read_mask_token(reader.content, vocab_size=model.vocab_size), state)


def _architecture(content: Mapping[str, Any]) -> str:
    """Return the architecture whose layers the head has."""
    return "Qwen3ForCausalLM" if content.get("model_type") == "qwen3" else "LlamaForCausalLM"


def _read_wide_layer(weights: WeightReader, config: DecoderConfig, *, starts_normed: bool) -> WideLayer:
    width, prefix = config.hidden_size, "layers.0."

    def norm(name: str) -> RMSNorm:
        return read_norm(weights, config, f"{prefix}{name}.weight", width=width)

    return WideLayer(
        attention=read_attention(weights, config, f"{prefix}self_attn.", index=0, width=2 * width),
        mlp=read_mlp(weights, config, f"{prefix}mlp."),
        attention_in=norm("hidden_norm"),
        attention_out=unchanged,
        mlp_in=norm("post_attention_layernorm"),
        mlp_out=unchanged,
        residual_scale=1.0,
        beside_in=norm("input_layernorm"),
        starts_normed=starts_normed,
    )


def _num_trained(content: Mapping[str, Any]) -> int | None:
    """Return the tokens per pass in speculators' format, which are as many as were trained, or None."""
    proposals = (content.get("speculators_config") or {}).get("proposal_methods") or [{}]
    found: int | None = proposals[0].get("speculative_tokens")
    return found


def _is_ascending(target_ids: Tensor | None) -> bool:
    return target_ids is None or bool((target_ids[1:] > target_ids[:-1]).all())
