"""Hands a decoder's weights to the native kernels: packed as they are read, so that only one copy is ever in memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import ModelError
from forerun.models.checkpoint import Checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.input_importance import InputImportance, LayerImportance
from forerun.models.kept_weights import KeptWeights, Unkept
from forerun.models.layers import DecoderLayer, GatedMLP, MixtureOfExperts, Norm, Product, ProjectionNorm, WideLayer
from forerun.models.sharding import Shard, part_of_head, part_of_layer
from forerun.ops.block_weight import AnyWeight, BlockLinear, BlockWeight, GatedWeight, JoinedWeight, interleaved
from forerun.ops.block_writing import BLOCK
from forerun.ops.layers import Linear, RMSNorm
from forerun.ops.native.attention import MOST_KEY_DIM
from forerun.ops.native.formats import OTHER_DTYPES, WEIGHT_FORMATS, lossless_format, pack_weight
from forerun.ops.native.formats.base import PackedWeight, WeightFormat
from forerun.ops.native.formats.blocks import rounding_rows
from forerun.ops.native.layers import (
    GATING_CODES,
    NativeExperts,
    NativeLayer,
    NativeLayers,
    NativeRMSNorm,
    PackedEmbedding,
    PackedLinear,
)
from forerun.ops.native.library import Kernels
from forerun.ops.native.memory import Arena, give_back_freed_memory
from forerun.ops.native.structs import AttentionStruct, LayerStruct

logger = logging.getLogger(__name__)

MOST_BESIDE_LINEAR = 0.1  # of a transformers model's weights: routers of experts take less, experts take most


def can_pack(config: DecoderConfig) -> bool:
    """Whether the kernels compute layers of these sizes."""
    widths = (config.hidden_size, config.inner_size, config.head_dim)
    return all(width % 2 == 0 for width in widths) and config.head_dim <= MOST_KEY_DIM


def fits_blocks(config: DecoderConfig) -> bool:
    """Whether all products have whole blocks of inputs, as int4 needs."""
    widths = (config.hidden_size, config.inner_size, config.num_heads * config.head_dim)
    return can_pack(config) and all(width % BLOCK == 0 for width in widths)


class Packing:
    """Packs one model's weights for the kernels in one format."""

    def __init__(
        self,
        kernels: Kernels,
        weight_format: WeightFormat,
        kept: KeptWeights | None = None,
        *,
        row_bits: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Pack for one of `num_ranks` processes, which has some outputs of each layer's products.

        `kept` has weights that were packed at an earlier start, or keeps those that are packed now; it has them whole.
        `row_bits`: weights in blocks are multiplied with rows of 8 or 16 bits, see `rounding_rows`; 0: with bf16.
        """
        self.kernels = kernels
        self.format = weight_format
        self.row_bits = row_bits
        self.rank = rank
        self.num_ranks = num_ranks
        self._kept = kept or Unkept()
        self._arena = Arena()

    @classmethod
    def choose(
        cls, kernels: Kernels, *, dtype: torch.dtype, quantization: str | None = None, row_bits: int = 0
    ) -> Packing:
        """The quantization that was asked for, by its name in `WEIGHT_FORMATS`, or else the best lossless format of `dtype`."""
        if quantization is not None:
            return cls(kernels, WEIGHT_FORMATS[quantization], row_bits=row_bits)
        return cls(kernels, lossless_format(dtype, level=kernels.level), row_bits=row_bits)

    @property
    def keeps_blocks(self) -> bool:
        """Whether weights that come in blocks are packed as they are: unless they are to be rounded, or rows are fp32."""
        return not self.format.is_quantization and self.format.activations == torch.bfloat16

    def kept_dtypes(self, checkpoint: Checkpoint) -> frozenset[torch.dtype]:
        """The dtypes in which a checkpoint's matrices are packed as they are, though rows are of another.

        What a user asks for as `dtype` is that of a whole checkpoint; in a mixed one every matrix has the dtype that suited it.
        """
        if self.format.is_quantization:
            return frozenset()
        if self.format.activations == torch.bfloat16:
            return frozenset([torch.float16, torch.float32] if checkpoint.facts.is_mixed else [])
        return frozenset(stored for activations, stored in OTHER_DTYPES if activations == self.format.activations)

    @property
    def _lossless(self) -> WeightFormat:
        """The format, or where that rounds, the best one of its rows' dtype that does not."""
        if not self.format.is_quantization:
            return self.format
        return lossless_format(self.format.activations, level=self.kernels.level)

    def expected_bytes(self, checkpoint: Checkpoint) -> int:
        """About how many bytes a checkpoint's weights will take."""
        if self.keeps_blocks and checkpoint.facts.is_mixed:
            return checkpoint.facts.num_bytes
        return int(self.format.bytes_per_weight * sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names()))

    def keeping(self, kept: KeptWeights) -> Packing:
        """The same with other kept weights."""
        return Packing(
            self.kernels, self.format, kept, row_bits=self.row_bits, rank=self.rank, num_ranks=self.num_ranks
        )

    def for_rank(self, rank: int, num_ranks: int) -> Packing:
        """The same for one process of several."""
        return Packing(self.kernels, self.format, self._kept, row_bits=self.row_bits, rank=rank, num_ranks=num_ranks)

    @property
    def needs_weights(self) -> bool:
        """Whether weights are packed; else they are kept already, and none need be read."""
        return not self._kept.is_complete

    def linear(self, weight: AnyWeight, bias: Tensor | None = None, *, name: str | None = None) -> PackedLinear:
        """Pack a weight [outputs, inputs], which is kept under `name` if it has one."""
        if name is None:
            return PackedLinear(self.kernels, self._as_computed(self._pack(weight, bias)))
        return PackedLinear(self.kernels, self._kept_or_packed(name, lambda: linear_of(weight, bias)))

    def head(self, weight: AnyWeight) -> PackedLinear:
        """Pack the weight of a head [vocab_size, inputs], which is kept as "head"."""
        if not isinstance(weight, Tensor) or not self.format.is_quantization:
            return self.linear(weight, name="head")
        found = self._kept_or_made("head", lambda: self.format.pack_head(self.kernels, weight, self._arena))
        return PackedLinear(self.kernels, self._as_computed(found))

    def embedding(self, weight: AnyWeight) -> PackedLinear:
        """Pack an embedding that is not the head, which is kept as "embedding": without loss, or as the format has it."""

        def made() -> PackedWeight:
            if isinstance(weight, Tensor) and self.format.rounds_embedding:
                return self.format.pack_head(self.kernels, weight, self._arena)
            return pack_weight(self.kernels, self._lossless, weight, None, self._arena)

        return PackedLinear(self.kernels, self._kept_or_made("embedding", made))

    def norm(self, norm: RMSNorm) -> NativeRMSNorm:
        """A norm over fp32 rows."""
        return NativeRMSNorm(self.kernels, norm.weight.float(), norm.eps)

    def layers(
        self,
        layers: Iterable[DecoderLayer],
        config: DecoderConfig,
        rotation_of: Sequence[int],
        importance: InputImportance | None = None,
    ) -> NativeLayers:
        """Pack a decoder's layers, one after the other as they come; `importance` measures what their inputs count."""
        packed: list[NativeLayer] = []
        for layer in layers:
            name = f"layer.{len(packed)}"
            measured = None if importance is None else importance.measure(layer)
            packed.append(self._layer(layer, config, measured, name=name))
            del layer  # before the next is read
            if self.needs_weights:
                give_back_freed_memory()
        return NativeLayers(self.kernels, packed, rotation_of)

    def _layer(
        self, layer: DecoderLayer, config: DecoderConfig, importance: LayerImportance | None, *, name: str
    ) -> NativeLayer:
        attention, mlp = layer.attention, layer.mlp

        def packed(part: str, read: Callable[[], Linear | BlockLinear]) -> PackedWeight:
            measured = None if importance is None else getattr(importance, part)
            return self._kept_or_packed(f"{name}.{part}", read, measured)

        weights = {
            "qkv": packed("qkv", lambda: _stored(attention.qkv)),
            "output": packed("output", lambda: _stored(attention.output)),
        }
        experts = None
        if isinstance(mlp, MixtureOfExperts):
            experts = self._experts(mlp, importance, name=name)
        else:
            weights["gate_up"] = packed("gate_up", lambda: _interleaved(mlp))
            weights["down"] = packed("down", lambda: _stored(mlp.down))
        places = {name: getattr(layer, name) for name in ("attention_in", "attention_out", "mlp_in", "mlp_out")}
        if isinstance(layer, WideLayer):
            places["beside_in"] = layer.beside_in
        norms: dict[str, Tensor] = {
            name: norm.weight.float() for name, norm in places.items() if isinstance(norm, RMSNorm)
        }
        norms |= _query_key_norms(attention.qk_norm, config)
        per_head = isinstance(attention.qk_norm, RMSNorm)
        struct = LayerStruct(
            attention=AttentionStruct(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                key_dim=config.head_dim,
                value_dim=config.head_dim,
                scale=attention.scale,
                soft_cap=attention.soft_cap or 0.0,
                window=attention.window or 0,
            ),
            width=config.hidden_size,
            beside_width=config.hidden_size if isinstance(layer, WideLayer) else 0,
            query_norm_width=config.head_dim * (1 if per_head else config.num_heads),
            key_norm_width=config.head_dim * (1 if per_head else config.num_kv_heads),
            norm_eps=config.norm_eps,
            residual_scale=layer.residual_scale,
            gating=GATING_CODES[config.activation],
            starts_normed=isinstance(layer, WideLayer) and layer.starts_normed,
        )
        whole = NativeLayer(struct=struct, weights=weights, norms=norms, experts=experts, sinks=attention.sinks)
        if self.num_ranks == 1:
            return whole
        return part_of_layer(self.kernels, whole, Shard(config, self.rank, self.num_ranks), self._arena)

    def _experts(self, mixture: MixtureOfExperts, importance: LayerImportance | None, *, name: str) -> NativeExperts:
        """Pack a mixture of experts, whose gates all read the same rows; the router's weights are never rounded."""
        gate_up, down = [], []
        for number, expert in enumerate(mixture.experts):
            part = f"{name}.expert.{number}"
            measured = None if importance is None else importance.gate_up
            gate_up.append(self._kept_or_packed(f"{part}.gate_up", partial(_interleaved, expert), measured))
            down.append(self._kept_or_packed(f"{part}.down", partial(_stored, expert.down)))

        def packed_router() -> PackedWeight:
            router = _stored(mixture.router)
            return pack_weight(self.kernels, self._lossless, router.weight, router.bias, self._arena)

        return NativeExperts(
            router=self._kept_or_made(f"{name}.router", packed_router),
            gate_up=gate_up,
            down=down,
            num_chosen=mixture.num_chosen,
            sums_to_one=mixture.sums_to_one,
        )

    def part_of_head(self, head: PackedLinear, shard: Shard) -> PackedWeight:
        """This rank's outputs of a head."""
        return part_of_head(head, shard, self._arena)

    def _kept_or_packed(
        self, name: str, read: Callable[[], Linear | BlockLinear], importance: Tensor | None = None
    ) -> PackedWeight:
        def packed() -> PackedWeight:
            linear = read()
            return self._pack(linear.weight, linear.bias, importance)

        return self._as_computed(self._kept_or_made(name, packed))

    def _kept_or_made(self, name: str, make: Callable[[], PackedWeight]) -> PackedWeight:
        """The weight that an earlier start has kept under this name; else what `make` packs, which is kept."""
        found = self._kept.find(name)
        if found is None:
            found = make()
            self._kept.add(name, found)
        return found

    def _as_computed(self, weight: PackedWeight) -> PackedWeight:
        return rounding_rows(weight, self.row_bits)

    def _pack(self, weight: AnyWeight, bias: Tensor | None, importance: Tensor | None = None) -> PackedWeight:
        # a whole weight of which only a part stays lies in memory of its own, which is then given back
        arena = self._arena if self.num_ranks == 1 else Arena()
        return pack_weight(self.kernels, self.format, weight, bias, arena, importance)


def linear_of(weight: AnyWeight, bias: Tensor | None) -> Linear | BlockLinear:
    """A linear layer on any weight."""
    return Linear(weight, bias) if isinstance(weight, Tensor) else BlockLinear(weight, bias)


def _interleaved(mlp: GatedMLP) -> Linear | BlockLinear:
    """The gate and up projections as rows of 16 gates, their 16 ups, the next 16 gates ...; blocks must be of one format."""
    stored = _stored(mlp.gate_up)
    bias = None if stored.bias is None else interleaved(*stored.bias.chunk(2))
    weight = stored.weight
    if isinstance(weight, JoinedWeight):
        gates, ups = weight.parts
        if isinstance(gates, BlockWeight) and isinstance(ups, BlockWeight) and gates.format == ups.format:
            return BlockLinear(GatedWeight(gates, ups), bias)
        weight = _in_one_format(weight)
    if isinstance(weight, Tensor):
        return Linear(interleaved(*weight.chunk(2)), bias)
    assert isinstance(weight, BlockWeight), "gates and ups are taken together here alone"
    half = len(weight.data) // 2
    return BlockLinear(GatedWeight(weight[:half], weight[half:]), bias)


def _in_one_format(joined: JoinedWeight) -> BlockWeight | Tensor:
    """Gates and ups that are stored in different ways, in one that holds both; said, as it takes more memory."""
    weight = joined.in_one_format()
    stored = (
        part.format if isinstance(part, BlockWeight) else str(part.dtype).removeprefix("torch.")
        for part in joined.parts
    )
    _say_larger(" and ".join(stored), weight.nbytes / math.prod(weight.shape))
    return weight


@cache
def _say_larger(stored: str, most_bytes: float) -> None:
    """Say once for each pair of formats that gates and ups may take more memory than in their file."""
    logger.warning(
        "gate and up projections of a layer in %s take up to %g bytes a weight, exactly as they are, in a format that holds "
        "either: the kernels compute both as one matrix",
        *(stored, most_bytes),
    )


def _stored(product: Product) -> Linear | BlockLinear:
    """A product that is not packed yet."""
    assert isinstance(product, (Linear, BlockLinear)), "a layer is packed once"
    return product


def _query_key_norms(norm: Norm, config: DecoderConfig) -> dict[str, Tensor]:
    """Weights on all query heads and key heads; empty: there is no norm."""
    if isinstance(norm, ProjectionNorm):
        return {"query_norm": norm.query.weight.float(), "key_norm": norm.key.weight.float()}
    if isinstance(norm, RMSNorm):
        query, key = torch.split(norm.weight.float(), [config.num_heads, config.num_kv_heads])
        return {"query_norm": query.contiguous(), "key_norm": key.contiguous()}
    return {}


class PackedModule(nn.Module):
    """An `nn.Linear` of transformers' own code on a packed weight."""

    def __init__(self, linear: PackedLinear, like: nn.Linear) -> None:
        super().__init__()
        self.linear: PackedLinear = linear
        self.weight = like.weight.detach().to("meta")  # shape and dtype, which foreign code may ask for

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return self.linear(x)


class PackedEmbeddingModule(nn.Module):
    """An `nn.Embedding` tied to a head that is packed."""

    def __init__(self, head: PackedLinear, like: nn.Embedding) -> None:
        super().__init__()
        self.embedding: PackedEmbedding = PackedEmbedding(head)
        self.num_embeddings = like.num_embeddings
        self.weight = like.weight.detach().to("meta")

    def forward(self, token_ids: Tensor) -> Tensor:
        """[...] -> [..., hidden_size]"""
        rows = self.embedding(token_ids.flatten()).to(self.weight.dtype)
        return rows.view(*token_ids.shape, rows.shape[1])


def pack_modules(model: nn.Module, packing: Packing) -> None:
    """Replace the linear layers of a transformers model by packed ones, in place: each goes before the next is packed.

    A head that is tied to an embedding of transformers' own kind stays: packing it would be a second copy.

    Raises:
        ModelError: the weights are to be rounded, but many of them are in no linear layer.
    """
    _check_beside_linear(model, packing.format)
    packed: dict[int, PackedModule] = {}  # by the identity of a linear layer, which may have several places
    heads: dict[int, PackedLinear] = {}  # by the address of the weight
    tables = _places(model, nn.Embedding)
    special = {table.weight.data_ptr() for table in _special_embeddings(model)}
    linears = _places(model, nn.Linear)
    while linears:
        parent, name, linear = linears.pop()
        address = linear.weight.data_ptr()
        if address not in special:
            if id(linear) not in packed:
                heads[address] = packing.linear(linear.weight, linear.bias)
                packed[id(linear)] = PackedModule(heads[address], linear)
            setattr(parent, name, packed[id(linear)])
            del linear
            give_back_freed_memory()
    for parent, name, table in tables:
        head = heads.get(table.weight.data_ptr())
        if head is not None:
            setattr(parent, name, PackedEmbeddingModule(head, table))


def _check_beside_linear(model: nn.Module, weight_format: WeightFormat) -> None:
    """Refuse to round a model, or warn that it is slow, where many of its weights are in no linear layer."""
    share, largest = _beside_linear(model)
    if share <= MOST_BESIDE_LINEAR:
        return
    if weight_format.is_quantization:
        raise ModelError(
            f"quantization: got {weight_format.name!r}, which rounds linear layers alone; {share:.0%} of the weights of "
            f"{type(model).__name__} are in none ({largest}, ...) and would stay as they are; leave it out"
        )
    _say_computed_by_torch(type(model).__name__, largest.rpartition(".")[2])


def can_be_rounded(model: nn.Module) -> bool:
    """Whether enough of a transformers model's weights is in linear layers, packed ones or not: those alone are rounded."""
    return _beside_linear(model)[0] <= MOST_BESIDE_LINEAR


def _beside_linear(model: nn.Module) -> tuple[float, str]:
    """The share of a transformers model's weights that is in no linear layer, embeddings aside, and the largest's name."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    places = [*_places(model, nn.Linear), *_places(model, PackedModule)]
    linear = {id(child.weight): child.weight.numel() for _parent, _name, child in places}
    beside = {
        name: weight.numel()
        for name, weight in model.named_parameters()
        if weight.ndim > 1 and id(weight) not in tables | linear.keys()
    }
    if not beside:
        return 0.0, ""
    share = sum(beside.values()) / (sum(beside.values()) + sum(linear.values()))
    return share, max(beside, key=lambda name: beside[name])


@cache
def _say_computed_by_torch(model: str, weights: str) -> None:
    """Say once for each kind of model that the kernels do not compute most of it."""
    logger.warning(
        "%s: many of its weights (%s, ...) are in no linear layer; torch computes with them, not the native kernels",
        model,
        weights,
    )


def _places(model: nn.Module, kind: type[nn.Module]) -> list[tuple[nn.Module, str, Any]]:
    """Modules that are just of `kind`, with the parent and the name they have there."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is kind
    ]


def _special_embeddings(model: nn.Module) -> list[nn.Embedding]:
    """Embeddings that do more than look up, such as Gemma's, which scale."""
    return [
        module for module in model.modules() if isinstance(module, nn.Embedding) and type(module) is not nn.Embedding
    ]
