"""One of the other processes of a group whose parts torch computes, on a GPU of its own or on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, LayerKVSpec
from forerun.executor.tensor_parallel.torch_layers import ComputePass
from forerun.executor.tensor_parallel.worker_process import WorkerSpec, local_specs, run_worker
from forerun.kv.cache import KVCache
from forerun.models.column_parallel import ColumnParallel, head_shares
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder, TorchLayers, make_rotaries, rotation_of
from forerun.models.layers import DecoderLayer
from forerun.models.loader import LOADERS
from forerun.ops.attention.paged import PagedAttention
from forerun.ops.collectives import TorchCollectives
from forerun.ops.layers import Linear
from forerun.ops.native.library import kernels_of_level
from forerun.ops.native.sharded.contents import from_bytes
from forerun.ops.native.sharded.exchange import Exchange
from forerun.ops.native.sharded.messages import (
    TARGET_HEAD,
    TARGET_LAYERS,
    ComputeHead,
    Drop,
    MoveKV,
    NewCache,
    TakeHead,
    TakeLayers,
)
from forerun.ops.rotary import Rotary, Rotation

TORCH_WEIGHTS = "torch"
"""What stands for a format of weights in the identity of what ranks load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchWorkerSpec(WorkerSpec):
    """What a worker in torch must know: where it computes, and the port at which the ranks' collectives meet."""

    device: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LentLayers:
    """A drafter's layers, whole, as rank 0 hands them out."""

    layers: Sequence[DecoderLayer]
    config: DecoderConfig
    dtype: torch.dtype


class OwnLayers:
    """A rank's part of some layers, with their rotations and the KV specs of its heads."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        config: DecoderConfig,
        collectives: TorchCollectives,
        rotaries: list[Rotary],
    ) -> None:
        """Take over layers that are this rank's part already."""
        self.layers = TorchLayers(layers, rotation_of(config))
        own = head_shares(config, collectives.num_ranks)[collectives.rank]
        spec = LayerKVSpec(num_kv_heads=config.num_kv_heads, key_dim=config.head_dim, value_dim=config.head_dim)
        self.kv_specs = local_specs([spec] * len(layers), len(own.kv_heads))
        self._rotaries = rotaries

    def rotations(self, positions: Tensor) -> list[Rotation | None]:
        """See `Decoder.rotations`."""
        return [None, *(rotary.rotation(positions) for rotary in self._rotaries)]


@dataclass(frozen=True, slots=True)
class OwnCache:
    """A KV cache of this rank's heads and the number of the layers that it is for."""

    kv: KVCache
    layers: int


class TorchWorker:
    """One rank's parts of the target and of drafters, its KV caches, and what it does with them."""

    def __init__(self, exchange: Exchange, collectives: TorchCollectives, decoder: Decoder) -> None:
        """Take over this rank's part of the target; its embedding is rank 0's."""
        assert isinstance(decoder.head.linear, Linear)
        self._exchange = exchange
        self._collectives = collectives
        self._columns = ColumnParallel(collectives)
        self._dtype, self._device = decoder.dtype, decoder.device
        self._layers = {TARGET_LAYERS: self._own(decoder.layers.layers, decoder.config, decoder.dtype)}
        self._heads = {TARGET_HEAD: self._columns.linear(decoder.head.linear)}
        self._caches: dict[int, OwnCache] = {}

    def begin(self) -> None:
        """See `Works`."""
        self._collectives.connect()

    def obey(self, message: Any) -> None:
        """See `Works`."""
        match message:
            case ComputePass():
                self._compute(message)
            case ComputeHead():
                head = self._heads[message.head]
                head(self._received(message.num_rows, head.own.weight.shape[1]))
            case MoveKV():
                moved = (torch.from_numpy(slots).to(self._device) for slots in (message.sources, message.destinations))
                self._caches[message.cache].kv.move(*moved)
            case NewCache():
                self._caches[message.number] = self._new_cache(message)
            case TakeLayers():
                lent: LentLayers = self._borrowed(message.places)
                layers = [self._columns.layer(layer, lent.config) for layer in lent.layers]
                self._layers[message.number] = self._own(layers, lent.config, lent.dtype)
            case TakeHead():
                self._heads[message.number] = self._columns.linear(self._borrowed(message.places))
            case Drop():
                for held in (self._layers, self._heads, self._caches):
                    held.pop(message.number, None)

    def _compute(self, message: ComputePass) -> None:
        own, cache = self._layers[message.layers], self._caches[message.cache]
        places = torch.empty(2, message.num_rows, dtype=torch.int64, device=self._device)
        positions, slots = self._collectives.broadcast(places)
        hidden = self._received(message.num_rows, message.width)
        batch = ForwardBatch(
            token_ids=positions,  # which rank 0 has embedded
            positions=positions,
            slot_mapping=slots,
            sequences=list(message.sequences),
            block_size=message.block_size,
            logits_rows=positions[:0],
        )
        attend = PagedAttention().begin(batch, cache.kv)
        own.layers(hidden, own.rotations(positions), attend, message.first, message.last)

    def _received(self, num_rows: int, width: int) -> Tensor:
        """What rank 0 broadcasts next."""
        return self._collectives.broadcast(torch.empty(num_rows, width, dtype=self._dtype, device=self._device))

    def _new_cache(self, message: NewCache) -> OwnCache:
        cache = KVCache(
            self._layers[message.layers].kv_specs,
            num_blocks=message.num_blocks,
            block_size=message.block_size,
            dtype=message.dtype,
            device=self._device,
        )
        return OwnCache(cache, message.layers)

    def _own(self, layers: Sequence[DecoderLayer], config: DecoderConfig, dtype: torch.dtype) -> OwnLayers:
        rotaries = make_rotaries(config, dtype, self._device)
        return OwnLayers(layers, config, self._collectives, list(rotaries.values()))

    def _borrowed(self, places: Sequence[range]) -> Any:
        """What rank 0 has lent to this rank."""

        def make_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self._device)

        return from_bytes(self._exchange.borrow(places[self._exchange.rank - 1]), make_tensor)


def load_worker(line: str, descriptor: int) -> tuple[Exchange, TorchWorker]:
    """Load a rank's part of the target.

    Raises:
        WorkerError: the files or the code are not those that rank 0 has loaded.
        ForerunError: the target cannot be loaded.
    """
    spec = TorchWorkerSpec.from_json(line)
    device = torch.device(spec.device)
    spec.check_identity(TORCH_WEIGHTS)
    torch.set_num_threads(spec.num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    kernels = kernels_of_level(spec.level)
    assert kernels is not None, "rank 0 exchanges messages by them"
    num_ranks = spec.sizes.num_ranks
    collectives = TorchCollectives(device, rank=spec.rank, num_ranks=num_ranks, port=spec.port)
    columns = ColumnParallel(collectives)
    model = LOADERS[spec.load_format](
        Path(spec.path), dtype=spec.torch_dtype, device=device, columns=columns, max_model_len=spec.max_model_len
    )
    assert isinstance(model, Decoder), "rank 0 has checked it"
    exchange = Exchange(kernels, descriptor, spec.sizes, rank=spec.rank)
    return exchange, TorchWorker(exchange, collectives, model)


if __name__ == "__main__":
    sys.exit(run_worker(int(sys.argv[1]), load_worker))
