"""The decoder that computes every architecture in the table of families."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.core.batch import ForwardBatch, ForwardResult, LayerKVSpec
from forerun.errors import ModelError
from forerun.models.config import DecoderConfig, HFConfig
from forerun.models.families import decoder_config
from forerun.models.layers import DecoderLayer, read_layer, read_norm
from forerun.models.weights import Checkpoint, WeightReader
from forerun.ops.attention.base import Attend
from forerun.ops.linear import Linear
from forerun.ops.norms import RMSNorm
from forerun.ops.rotary import RopeConfig, Rotary, Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A decoder's parts as they were loaded."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: list[DecoderLayer]
    norm: RMSNorm
    head: Linear


class Decoder:
    """A dense transformer as `TargetModel`; drafters may also call its parts."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.num_layers = config.num_layers
        self.max_model_len = config.max_model_len
        spec = LayerKVSpec(num_kv_heads=config.num_kv_heads, key_dim=config.head_dim, value_dim=config.head_dim)
        self.kv_specs = [spec] * config.num_layers
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.embedding = weights.embedding
        self.layers = weights.layers
        self.norm = weights.norm
        self.head = weights.head
        # In the model's dtype: Gemma was trained with the rounded factor.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.dtype, device=self.device)
        ropes: list[RopeConfig | None] = [None, *dict.fromkeys(rope for rope in config.ropes if rope is not None)]
        self._rope_of_layer = [ropes.index(rope) for rope in config.ropes]
        self._rotaries = [Rotary(rope, dtype=self.dtype, device=self.device) for rope in ropes if rope is not None]

    def forward(self, batch: ForwardBatch, attend: Attend) -> ForwardResult:
        """Compute one packed forward pass, see `TargetModel.forward`.

        Raises:
            ModelError: `batch.features` names one that there is not.
        """
        kept_layers = self._kept_layers(batch.features)
        features: dict[str, Tensor] = {}
        hidden = self.embed(batch.token_ids)
        rotations = self.rotations(batch.positions)
        for index, layer in enumerate(self.layers):
            if index in kept_layers:
                features[f"hidden.{index}"] = hidden
            hidden = layer(hidden, rotations[self._rope_of_layer[index]], attend)
        if self.num_layers in kept_layers:
            features[f"hidden.{self.num_layers}"] = hidden
        if "last_hidden" in batch.features:
            features["last_hidden"] = hidden = self.norm(hidden)
            judged = hidden.index_select(0, batch.logits_rows)
        else:
            judged = self.norm(hidden.index_select(0, batch.logits_rows))
        return ForwardResult(logits=self.logits(judged), features=features)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden_size]"""
        hidden = F.embedding(token_ids, self.embedding)
        return hidden if self.config.embedding_scale == 1.0 else hidden * self._embedding_scale

    def rotations(self, positions: Tensor) -> list[Rotation | None]:
        """What layers rotate rows at `positions` [T] by: none first, then each distinct rope."""
        return [None, *(rotary.rotation(positions) for rotary in self._rotaries)]

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [R, vocab_size] fp32 of hidden states [R, hidden_size] after the final norm."""
        logits = self.head(normed).float()
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _kept_layers(self, features: frozenset[str]) -> frozenset[int]:
        """Indices N of the features "hidden.N"."""
        if not features:
            return frozenset()
        known = {f"hidden.{index}": index for index in range(self.num_layers + 1)}
        unknown = features - known.keys() - {"last_hidden"}
        if unknown:
            raise ModelError(f"feature {min(unknown)!r}: may be last_hidden or hidden.0 to hidden.{self.num_layers}")
        return frozenset(known[name] for name in features if name in known)


def build_decoder(hf_config: HFConfig, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Load a decoder's weights as its architecture's row says.

    Raises:
        ModelError: the architecture has no row, the configuration holds what the row has no code for, or
            a tensor is missing, surplus or of another shape than the configuration says.
    """
    config = decoder_config(hf_config)
    reader = WeightReader(checkpoint, dtype=dtype, device=device)
    vocab_shape = (config.vocab_size, config.hidden_size)
    embedding = reader.tensor(f"{config.root}embed_tokens.weight", vocab_shape)
    if config.tied:
        reader.tie(config.head, embedding)
    weights = DecoderWeights(
        embedding=embedding,
        layers=[read_layer(reader, config, index=index) for index in range(config.num_layers)],
        norm=read_norm(reader, config, f"{config.root}norm.weight", width=config.hidden_size),
        head=Linear(embedding if config.tied else reader.tensor(config.head, vocab_shape)),
    )
    reader.finish(config.unused_prefixes)
    return Decoder(config, weights)
