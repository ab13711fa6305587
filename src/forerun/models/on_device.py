"""Hands a model's parts in torch to the functions of `ops.cuda`, which compute with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder, DecoderParts, TorchLayers
from forerun.models.layers import DecoderLayer, GatedMLP, Norm, Product, ProjectionNorm, SelfAttention, WideLayer
from forerun.ops.cuda.decoder_layers import (
    DeviceEmbedding,
    DeviceHead,
    DeviceLayer,
    DeviceLayers,
    DeviceLinear,
    DeviceRMSNorm,
    DeviceRotary,
)
from forerun.ops.cuda.functions import LayerFunctions
from forerun.ops.cuda.passes import DeviceAttention
from forerun.ops.layers import Embedding, Head, Linear, RMSNorm
from forerun.ops.rotary import Rotary

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def obstacle(model: object) -> str | None:
    """Why the functions cannot compute a model; None where they can."""
    if not isinstance(model, Decoder):
        return "it runs through transformers' own code"
    if not isinstance(model.layers, TorchLayers):
        return "other kernels, or other processes, have its weights"
    if model.config.experts is not None:
        return "its layers have experts"
    if not all(is_dense(layer) for layer in model.layers.layers) or not isinstance(model.head.linear, Linear):
        return "its weights are in blocks of few bits"
    if model.dtype not in DTYPES:
        return f"its dtype is {str(model.dtype).removeprefix('torch.')}"
    return None


def is_dense(layer: DecoderLayer) -> bool:
    """Whether all matrices of a layer are plain tensors."""
    products = (layer.attention.qkv, layer.attention.output, *layer.mlp.products)
    return all(isinstance(product, Linear) for product in products)


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """Makes the parts of models on one device; see `Packing`, which does so for the CPU's kernels.

    Args:
        functions: compute them.
        max_length: tokens of the longest text.
    """

    functions: LayerFunctions
    max_length: int

    def decoder(self, model: Decoder) -> Decoder:
        """The same decoder by the functions, for which there is no `obstacle`; weights are shared."""
        embedding, head, norm, config = model.embedding, model.head, model.norm, model.config
        assert isinstance(embedding, Embedding), "torch computes"
        assert isinstance(head, Head), "torch computes"
        assert isinstance(head.linear, Linear), "its weights are plain tensors"
        assert isinstance(norm, RMSNorm), "torch computes"
        assert isinstance(model.layers, TorchLayers), "torch computes"
        parts = DecoderParts(
            embedding=self.embedding(embedding.table, embedding.scale),
            layers=self.layers(model.layers.layers, config, model.layers.rotation_of),
            norm=self.norm(norm),
            head=DeviceHead(self.linear(head.linear.weight, head.linear.bias), head.scale, head.soft_cap),
            rotaries={
                rope: self.rotary(Rotary(rope, dtype=torch.float32, device=model.device)) for rope in model.ropes
            },
            is_batch_invariant=self.functions.are_batch_invariant,
        )
        return Decoder(config, parts, dtype=model.dtype, device=model.device)

    def attention(self) -> DeviceAttention:
        """Attention over any cache."""
        return DeviceAttention(self.functions)

    def embedding(self, table: Tensor, scale: float = 1.0) -> DeviceEmbedding:
        """An embedding; its scale is rounded to the table's dtype, as Gemma's is."""
        return DeviceEmbedding(self.functions, table, torch.tensor(scale, dtype=table.dtype).item())

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> DeviceLinear:
        """A product."""
        return DeviceLinear(self.functions, weight.contiguous(), bias)

    def head(self, weight: Tensor) -> DeviceHead:
        """A head."""
        return DeviceHead(self.linear(weight))

    def norm(self, norm: RMSNorm) -> DeviceRMSNorm:
        """A norm over whole rows."""
        return DeviceRMSNorm(self.functions, norm.weight, norm.eps)

    def rotary(self, rotary: Rotary) -> DeviceRotary:
        """The rotations of all positions that a text may have."""
        return DeviceRotary(rotary, num_positions=self.max_length)

    def layers(self, layers: Sequence[DecoderLayer], config: DecoderConfig, rotation_of: Sequence[int]) -> DeviceLayers:
        """A stack of layers that are dense."""
        return DeviceLayers(self.functions, [self._layer(layer, config) for layer in layers], rotation_of)

    def _layer(self, layer: DecoderLayer, config: DecoderConfig) -> DeviceLayer:
        attention, mlp = layer.attention, layer.one_mlp
        wide = layer if isinstance(layer, WideLayer) else None
        return DeviceLayer(
            index=attention.index,
            **self._products(attention, mlp),
            attention_in=_weight(layer.attention_in),
            attention_out=_weight(layer.attention_out),
            mlp_in=_weight(layer.mlp_in),
            mlp_out=_weight(layer.mlp_out),
            head_norms=_head_norms(attention),
            projection_norms=_projection_norms(attention.qk_norm),
            eps=config.norm_eps,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            scale=attention.scale,
            window=attention.window,
            soft_cap=attention.soft_cap,
            activation=config.activation,
            residual_scale=layer.residual_scale,
            beside_in=None if wide is None else _weight(wide.beside_in),
            starts_normed=wide is not None and wide.starts_normed,
        )

    def _products(self, attention: SelfAttention, mlp: GatedMLP) -> dict[str, DeviceLinear]:
        stored: dict[str, Product] = {
            "qkv": attention.qkv,
            "output": attention.output,
            "gate_up": mlp.gate_up,
            "down": mlp.down,
        }
        products = {}
        for name, product in stored.items():
            assert isinstance(product, Linear), "the layer is dense"
            products[name] = self.linear(product.weight, product.bias)
        return products


def _weight(norm: Norm) -> Tensor | None:
    return norm.weight if isinstance(norm, RMSNorm) else None


def _head_norms(attention: SelfAttention) -> dict[str, Tensor]:
    """Weights over each query head and each key head; empty: there are none."""
    norm = attention.qk_norm
    if not isinstance(norm, RMSNorm):
        return {}
    query, key = torch.split(norm.weight, [attention.num_heads, attention.num_kv_heads])
    return {"query_norm": query.contiguous(), "key_norm": key.contiguous()}


def _projection_norms(norm: Norm) -> tuple[Tensor, Tensor] | None:
    return (norm.query.weight, norm.key.weight) if isinstance(norm, ProjectionNorm) else None
