"""The decoder, which computes every architecture in the table of families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, ForwardResult, LayerKVSpec
from forerun.errors import ModelError
from forerun.models.checkpoint import Checkpoint, WeightReader, unstacked
from forerun.models.config import OWN_EXPERTS, TRANSFORMERS_STACKS, DecoderConfig, ExpertNames, ExpertsConfig, HFConfig
from forerun.models.families import decoder_config
from forerun.models.input_importance import InputImportance
from forerun.models.layers import DecoderLayer, read_layer, read_norm
from forerun.models.packing import Packing, can_pack
from forerun.ops.attention import Attend
from forerun.ops.cuda.decoder_layers import DeviceHead, DeviceRotary
from forerun.ops.cuda.passes import DevicePass
from forerun.ops.layers import Embedding, Head, Linear, RMSNorm
from forerun.ops.native.attention import MOST_KEY_DIM, NativePass
from forerun.ops.native.layers import NativeLayers, PackedEmbedding, PackedHead
from forerun.ops.native.whole_pass import whole_pass
from forerun.ops.rotary import RopeConfig, Rotary, RotaryTable, Rotation

if TYPE_CHECKING:
    from forerun.models.column_parallel import ColumnParallel


class Layers(Protocol):
    """The decoder's layers, in torch (`TorchLayers`), on the CPU's kernels (`NativeLayers`) or a GPU's (`DeviceLayers`)."""

    layers: Sequence[Any]

    def __call__(
        self, hidden: Tensor, rotations: list[Rotation | None], attend: Any, first: int, last: int, /
    ) -> Tensor:
        """Compute layers [first, last): [T, width of layer `first`'s input] -> the residual stream [T, hidden_size]."""
        ...


@dataclass(slots=True)
class TorchLayers:
    """Layers in torch, one after the other; layer i takes rotation number `rotation_of[i]` of a pass."""

    layers: Sequence[DecoderLayer]
    rotation_of: Sequence[int]

    def __call__(
        self, hidden: Tensor, rotations: list[Rotation | None], attend: Attend, first: int, last: int
    ) -> Tensor:
        """See `Layers`."""
        for layer, rotation in zip(self.layers[first:last], self.rotation_of[first:last], strict=True):
            hidden = layer(hidden, rotations[rotation], attend)
        return hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """The modules of a decoder, in torch or on kernels."""

    embedding: Callable[[Tensor], Tensor]  # [T] -> [T, hidden_size]
    layers: Layers
    norm: Callable[[Tensor], Tensor]
    head: Head | PackedHead | DeviceHead
    rotaries: Mapping[RopeConfig, Rotary | RotaryTable | DeviceRotary]
    is_batch_invariant: bool  # see `TargetModel`


class Decoder:
    """A dense transformer, as a `TargetModel`; drafters may also call its layers and its norm."""

    def __init__(self, config: DecoderConfig, parts: DecoderParts, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_layers
        self.max_model_len = config.max_model_len
        spec = LayerKVSpec(num_kv_heads=config.num_kv_heads, key_dim=config.head_dim, value_dim=config.head_dim)
        self.kv_specs = [spec] * config.num_layers
        self.dtype = dtype
        self.device = device
        self._parts = parts
        self.is_batch_invariant = parts.is_batch_invariant
        self.finds_candidates = isinstance(parts.head, PackedHead)
        self.embedding = parts.embedding
        self.head = parts.head
        self.layers = parts.layers
        self.norm = parts.norm
        self._rotaries = list(parts.rotaries.values())
        self._whole = whole_pass(
            parts.embedding, parts.layers, config.num_layers, self._rotaries, parts.norm, parts.head
        )
        self.ropes = list(parts.rotaries)  # that differ, of all layers
        self._layers_of: dict[frozenset[str], frozenset[int]] = {}  # see `_kept_layers`

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices that a pass reads, of experts if its rows choose them; an untied embedding, of which it reads a few
        rows, does not count.
        """
        layers: int = sum(layer.num_bytes for layer in self.layers.layers)
        return layers + self._parts.head.linear.num_bytes

    @property
    def row_bits(self) -> int:
        """To how many bits the activations are rounded that weights in blocks are multiplied with, 8 or 16; 0: to none."""
        layers = self.layers.layers if isinstance(self.layers, NativeLayers) else ()
        return max((weight.row_bits for layer in layers for weight in layer.all_weights), default=0)

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `TargetModel`."""
        return self._parts.embedding(token_ids)

    def logits(self, normed: Tensor) -> Tensor:
        """See `TargetModel`."""
        return self._parts.head(normed)

    def head_rows(self, token_ids: Tensor) -> Tensor:
        """See `TargetModel`."""
        return self._parts.head.linear.rows(token_ids)

    def forward(self, batch: ForwardBatch, attend: Attend) -> ForwardResult:
        """Compute one packed forward pass, see `TargetModel.forward`.

        Raises:
            ModelError: `batch.features` names hidden states that the model does not have.
        """
        kept_layers = self._kept_layers(batch.features)
        is_whole = batch.num_candidates and "last_hidden" not in batch.features
        if self._whole is not None and is_whole and can_keep(attend, kept_layers):
            return self._whole(batch, attend, kept_layers)
        features: dict[str, Tensor] = {}
        hidden = self.embed(batch.token_ids)
        rotations = self.rotations(batch.positions)
        if isinstance(self.layers, NativeLayers) and can_keep(attend, kept_layers):
            hidden = self.layers(hidden, rotations, attend, 0, self.num_layers, keep=kept_layers)
        else:
            for first, last in pairwise(sorted({0, *kept_layers, self.num_layers})):
                if first in kept_layers:
                    features[f"hidden.{first}"] = hidden
                hidden = self.layers(hidden, rotations, attend, first, last)
            if self.num_layers in kept_layers:
                features[f"hidden.{self.num_layers}"] = hidden
        if "last_hidden" in batch.features:
            features["last_hidden"] = hidden = self.norm(hidden)
            judged = hidden.index_select(0, batch.logits_rows)
        else:
            judged = self.norm(hidden.index_select(0, batch.logits_rows))
        if isinstance(attend, DevicePass):
            features = attend.keep(features)
        if not batch.num_candidates:
            return ForwardResult(logits=self.logits(judged), features=features)
        logits, candidates = self._parts.head.with_candidates(judged, batch.num_candidates)
        return ForwardResult(logits=logits, candidates=candidates, features=features)

    def first_layers(self, num_layers: int) -> Decoder:
        """Return the first layers as a model that shares this one's weights and its layers of the KV cache."""
        config = replace(self.config, ropes=self.config.ropes[:num_layers], windows=self.config.windows[:num_layers])
        return Decoder(config, self._parts, dtype=self.dtype, device=self.device)

    def with_parts(self, *, layers: Layers, head: Head | PackedHead | DeviceHead) -> Decoder:
        """Return the same decoder with other layers and another head, which compute what these do."""
        return Decoder(
            self.config, replace(self._parts, layers=layers, head=head), dtype=self.dtype, device=self.device
        )

    def rotations(self, positions: Tensor) -> list[Rotation | None]:
        """Return the rotations of rows at `positions` [T]: None for layers without a rope, then each distinct rope's."""
        return [None, *(rotary.rotation(positions) for rotary in self._rotaries)]

    def _kept_layers(self, features: frozenset[str]) -> frozenset[int]:
        """Return the layers N that `features` names as "hidden.N"."""
        found = self._layers_of.get(features)
        if found is None:
            known = {f"hidden.{index}": index for index in range(self.num_layers + 1)}
            unknown = features - known.keys() - {"last_hidden"}
            if unknown:
                raise ModelError(
                    f"feature {min(unknown)!r}: may be last_hidden or hidden.0 to hidden.{self.num_layers}"
                )
            found = self._layers_of[features] = frozenset(known[name] for name in features if name in known)
        return found


def can_keep(attend: Attend, layers: frozenset[int]) -> TypeGuard[NativePass]:
    """Whether a pass is one of the kernels that writes the residual streams before these layers to its cache."""
    return isinstance(attend, NativePass) and attend.addresses.has_room_for(layers)


def build_decoder(
    hf_config: HFConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    packing: Packing | None = None,
    columns: ColumnParallel | None = None,
    max_model_len: int | None = None,
) -> Decoder:
    """Load a decoder's weights as its family's row says.

    `packing` packs them for the native kernels. Where torch computes, `columns` takes one rank's part of the layers.
    `max_model_len`: see `DecoderConfig.for_texts_of`.

    Raises:
        ModelError: the architecture has no row, the row does not cover a value in the configuration, or a
            tensor is missing, surplus or of another shape than the configuration says.
    """
    config = decoder_config(hf_config, max_model_len=max_model_len)
    if config.experts is not None:
        names = _expert_names(config, config.experts, checkpoint)
        config = replace(config, experts=replace(config.experts, names=names))
        checkpoint = unstacked(checkpoint, names)
    if packing is not None and can_pack(config):
        reader = WeightReader(
            checkpoint,
            dtype=dtype,
            device=device,
            keeps_blocks=packing.keeps_blocks,
            kept_dtypes=packing.kept_dtypes(checkpoint),
            needs_matrices=packing.needs_weights,
        )
        parts = _native_parts(config, reader, packing)
    elif packing is not None and packing.format.is_quantization:
        raise ModelError(
            f"quantization: got {packing.format.name!r}, but the native kernels need even widths and heads of at most "
            f"{MOST_KEY_DIM}; got hidden_size={config.hidden_size}, intermediate_size={config.inner_size}, "
            f"head_dim={config.head_dim}; leave quantization out"
        )
    else:
        reader = WeightReader(checkpoint, dtype=dtype, device=device)
        parts = _torch_parts(config, reader, columns)
    reader.finish(config.unused_prefixes)
    return Decoder(config, parts, dtype=dtype, device=device)


def _expert_names(config: DecoderConfig, experts: ExpertsConfig, checkpoint: Checkpoint) -> ExpertNames:
    """What a checkpoint calls its experts: the family's names, or transformers' own, as it saves a model in its newer form."""
    is_newer = f"{config.root}layers.0.{TRANSFORMERS_STACKS.gate_up}" in checkpoint.names()
    return OWN_EXPERTS if is_newer and not experts.names.stacks else experts.names


def _torch_parts(config: DecoderConfig, reader: WeightReader, columns: ColumnParallel | None) -> DecoderParts:
    embedding = reader.tensor(*_embedding_place(config))
    if config.tied:
        reader.tie(config.head, embedding)
    head = Linear(embedding if config.tied else reader.tensor(config.head, tuple(embedding.shape)))
    read = (read_layer(reader, config, index=index) for index in range(config.num_layers))
    layers = read if columns is None else (columns.layer(layer, config) for layer in read)
    return DecoderParts(
        embedding=Embedding(embedding, config.embedding_scale),
        layers=TorchLayers(list(layers), rotation_of(config)),
        norm=_read_final_norm(config, reader),
        head=Head(head, config.logit_scale, config.logit_soft_cap),
        rotaries=make_rotaries(config, reader.dtype, reader.device),
        is_batch_invariant=False,
    )


def _native_parts(config: DecoderConfig, reader: WeightReader, packing: Packing) -> DecoderParts:
    """Read parts for the kernels: hidden states and angles are fp32, embeddings are read from what is packed."""
    scale = _rounded(config.embedding_scale, reader.dtype)
    if config.tied:
        table = reader.matrix(*_embedding_place(config))
        reader.tie(config.head, table)
        head = packing.head(table)
        embedding = PackedEmbedding(head, scale)
        del table  # frees its memory before the layers are read
    else:
        head = packing.head(reader.matrix(config.head, _embedding_place(config)[1]))
        embedding = PackedEmbedding(packing.embedding(reader.matrix(*_embedding_place(config))), scale)
    rotaries = make_rotaries(config, torch.float32, reader.device)
    weighs = packing.format.weighs_inputs and packing.needs_weights
    # measured on short texts whatever the decoder is for, as packed weights are kept for all starts
    importance = _input_importance(config.for_texts_of(None), reader, embedding) if weighs else None
    read = (read_layer(reader, config, index=i) for i in range(config.num_layers))
    return DecoderParts(
        embedding=embedding,
        layers=packing.layers(read, config, rotation_of(config), importance),
        norm=packing.norm(_read_final_norm(config, reader)),
        head=PackedHead(head, config.logit_scale, config.logit_soft_cap),
        rotaries={rope: RotaryTable(rotary) for rope, rotary in rotaries.items()},
        is_batch_invariant=True,
    )


def _embedding_place(config: DecoderConfig) -> tuple[str, tuple[int, int]]:
    """Name and shape of the embedding."""
    return f"{config.root}embed_tokens.weight", (config.vocab_size, config.hidden_size)


def _input_importance(
    config: DecoderConfig, reader: WeightReader, embedding: Callable[[Tensor], Tensor]
) -> InputImportance:
    """What measures how much the inputs of the layers count, in the dtype in which they are read."""
    rotaries = make_rotaries(config, reader.dtype, reader.device).values()
    return InputImportance(
        lambda token_ids: embedding(token_ids).to(reader.dtype),
        config.vocab_size,
        lambda positions: [None, *(rotary.rotation(positions) for rotary in rotaries)],
        rotation_of(config),
    )


def _read_final_norm(config: DecoderConfig, reader: WeightReader) -> RMSNorm:
    return read_norm(reader, config, f"{config.root}norm.weight", width=config.hidden_size)


def _distinct_ropes(config: DecoderConfig) -> list[RopeConfig]:
    return list(dict.fromkeys(rope for rope in config.ropes if rope is not None))


def make_rotaries(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> dict[RopeConfig, Rotary]:
    """Make a rotary embedding for each distinct rope of a decoder's layers."""
    return {rope: Rotary(rope, dtype=dtype, device=device) for rope in _distinct_ropes(config)}


def rotation_of(config: DecoderConfig) -> list[int]:
    """Return for each layer the index of its rotation in `Decoder.rotations`."""
    ropes = [None, *_distinct_ropes(config)]
    return [ropes.index(rope) for rope in config.ropes]


def _rounded(value: float, dtype: torch.dtype) -> float:
    """Round to the model's dtype: Gemma was trained with the rounded factor."""
    return torch.tensor(value, dtype=dtype).item()
