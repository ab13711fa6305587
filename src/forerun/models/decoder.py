"""The decoder that computes every architecture in the table of families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, ForwardResult, LayerKVSpec
from forerun.errors import ModelError
from forerun.models.config import DecoderConfig, HFConfig
from forerun.models.families import decoder_config
from forerun.models.layers import DecoderLayer, read_layer, read_norm
from forerun.models.packing import Packing, can_pack
from forerun.models.weights import Checkpoint, WeightReader
from forerun.ops.attention.base import Attend
from forerun.ops.layers import Embedding, Head, Linear, RMSNorm
from forerun.ops.native.attention import MOST_KEY_DIM
from forerun.ops.native.layers import PackedEmbedding, PackedHead
from forerun.ops.rotary import RopeConfig, Rotary, RotaryTable, Rotation


class Layers(Protocol):
    """The decoder's layers, of torch calls (`TorchLayers`) or native (`NativeLayers`)."""

    layers: Sequence[Any]

    def __call__(
        self, hidden: Tensor, rotations: list[Rotation | None], attend: Any, first: int, last: int, /
    ) -> Tensor:
        """Rows [T, width that layer `first` reads] -> the residual stream after layer `last` - 1, [T, hidden_size]."""
        ...


@dataclass(slots=True)
class TorchLayers:
    """Layers one by one; `rotation_of[i]` says which of a pass's rotations layer i takes."""

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
    """What a decoder computes with, of torch or native."""

    embedding: Callable[[Tensor], Tensor]  # [T] -> [T, hidden_size]
    layers: Layers
    norm: Callable[[Tensor], Tensor]
    head: Head | PackedHead
    rotaries: Mapping[RopeConfig, Rotary | RotaryTable]
    is_batch_invariant: bool  # see `TargetModel`


class Decoder:
    """A dense transformer as `TargetModel`; drafters may also call its parts."""

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
        self.layers = parts.layers
        self.norm = parts.norm
        self._rotaries = list(parts.rotaries.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices that a pass reads; of an embedding that is not the head it reads a row or a few."""
        layers: int = sum(layer.num_bytes for layer in self.layers.layers)
        return layers + self._parts.head.linear.num_bytes

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
            ModelError: `batch.features` names one that there is not.
        """
        kept_layers = self._kept_layers(batch.features)
        features: dict[str, Tensor] = {}
        hidden = self.embed(batch.token_ids)
        rotations = self.rotations(batch.positions)
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
        return ForwardResult(logits=self.logits(judged), features=features)

    def first_layers(self, num_layers: int) -> Decoder:
        """The same model without its later layers, over the same weights and the same layers of a KV cache."""
        config = replace(self.config, ropes=self.config.ropes[:num_layers], windows=self.config.windows[:num_layers])
        return Decoder(config, self._parts, dtype=self.dtype, device=self.device)

    def rotations(self, positions: Tensor) -> list[Rotation | None]:
        """What layers rotate rows at `positions` [T] by: none first, then each distinct rope."""
        return [None, *(rotary.rotation(positions) for rotary in self._rotaries)]

    def _kept_layers(self, features: frozenset[str]) -> frozenset[int]:
        """Indices N of the features "hidden.N"."""
        if not features:
            return frozenset()
        known = {f"hidden.{index}": index for index in range(self.num_layers + 1)}
        unknown = features - known.keys() - {"last_hidden"}
        if unknown:
            raise ModelError(f"feature {min(unknown)!r}: may be last_hidden or hidden.0 to hidden.{self.num_layers}")
        return frozenset(known[name] for name in features if name in known)


def build_decoder(
    hf_config: HFConfig,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    packing: Packing | None = None,
) -> Decoder:
    """Load a decoder's weights as its architecture's row says; `packing` hands them to the native kernels.

    Raises:
        ModelError: the architecture has no row, the configuration holds what the row has no code for, or
            a tensor is missing, surplus or of another shape than the configuration says.
    """
    config = decoder_config(hf_config)
    reader = WeightReader(checkpoint, dtype=dtype, device=device)
    if packing is not None and can_pack(config):
        parts = _native_parts(config, reader, packing)
    elif packing is not None and packing.format.is_quantization:
        raise ModelError(
            f"quantization: got {packing.format.name!r}, but the native kernels need even widths and heads of at most "
            f"{MOST_KEY_DIM}; got hidden_size={config.hidden_size}, intermediate_size={config.intermediate_size}, "
            f"head_dim={config.head_dim}; leave quantization out"
        )
    else:
        parts = _torch_parts(config, reader)
    reader.finish(config.unused_prefixes)
    return Decoder(config, parts, dtype=dtype, device=device)


def _torch_parts(config: DecoderConfig, reader: WeightReader) -> DecoderParts:
    embedding = _read_embedding(config, reader)
    head = Linear(embedding if config.tied else reader.tensor(config.head, tuple(embedding.shape)))
    return DecoderParts(
        embedding=Embedding(embedding, config.embedding_scale),
        layers=TorchLayers(
            [read_layer(reader, config, index=index) for index in range(config.num_layers)], rotation_of(config)
        ),
        norm=_read_final_norm(config, reader),
        head=Head(head, config.logit_scale, config.logit_soft_cap),
        rotaries=make_rotaries(config, reader.dtype, reader.device),
        is_batch_invariant=False,
    )


def _native_parts(config: DecoderConfig, reader: WeightReader, packing: Packing) -> DecoderParts:
    """Parts on the kernels: hidden states and angles are fp32, a tied embedding is read from the packed head."""
    table = _read_embedding(config, reader)
    embedding: PackedEmbedding | Embedding
    if config.tied:
        head = packing.linear(table)
        embedding = PackedEmbedding(head, _rounded(config.embedding_scale, reader.dtype))
    else:
        head = packing.linear(reader.tensor(config.head, tuple(table.shape)))
        embedding = Embedding(table, config.embedding_scale, torch.float32)
    del table  # before the layers take their memory
    rotaries = make_rotaries(config, torch.float32, reader.device)
    return DecoderParts(
        embedding=embedding,
        layers=packing.layers(
            (read_layer(reader, config, index=i) for i in range(config.num_layers)), config, rotation_of(config)
        ),
        norm=packing.norm(_read_final_norm(config, reader)),
        head=PackedHead(head, config.logit_scale, config.logit_soft_cap),
        rotaries={rope: RotaryTable(rotary) for rope, rotary in rotaries.items()},
        is_batch_invariant=True,
    )


def _read_embedding(config: DecoderConfig, reader: WeightReader) -> Tensor:
    """[vocab_size, hidden_size]"""
    table = reader.tensor(f"{config.root}embed_tokens.weight", (config.vocab_size, config.hidden_size))
    if config.tied:
        reader.tie(config.head, table)
    return table


def _read_final_norm(config: DecoderConfig, reader: WeightReader) -> RMSNorm:
    return read_norm(reader, config, f"{config.root}norm.weight", width=config.hidden_size)


def _distinct_ropes(config: DecoderConfig) -> list[RopeConfig]:
    return list(dict.fromkeys(rope for rope in config.ropes if rope is not None))


def make_rotaries(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> dict[RopeConfig, Rotary]:
    """One for each distinct rope of a decoder's layers."""
    return {rope: Rotary(rope, dtype=dtype, device=device) for rope in _distinct_ropes(config)}


def rotation_of(config: DecoderConfig) -> list[int]:
    """For each layer the index of its rotation in `Decoder.rotations`."""
    ropes = [None, *_distinct_ropes(config)]
    return [ropes.index(rope) for rope in config.ropes]


def _rounded(value: float, dtype: torch.dtype) -> float:
    """In the model's dtype: Gemma was trained with the rounded factor."""
    return torch.tensor(value, dtype=dtype).item()
