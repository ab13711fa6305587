"""One of the other processes of a group whose parts the native kernels compute."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.core.batch import LayerKVSpec
from forerun.executor.tensor_parallel.worker_process import WorkerSpec, local_specs, run_worker
from forerun.kv.cache import KVCache
from forerun.models.decoder import Decoder
from forerun.models.loader import LOADERS
from forerun.models.packing import Packing
from forerun.models.sharding import Shard
from forerun.ops.native.attention import CacheAddresses
from forerun.ops.native.formats import WEIGHT_FORMATS
from forerun.ops.native.layers import NativeLayers, PackedHead
from forerun.ops.native.library import Kernels, kernels_of_level
from forerun.ops.native.memory import Arena
from forerun.ops.native.sharded.contents import LayersContent, from_bytes
from forerun.ops.native.sharded.exchange import Exchange
from forerun.ops.native.sharded.layers import HeadPart, LayersPart
from forerun.ops.native.sharded.messages import (
    TARGET_HEAD,
    TARGET_LAYERS,
    ComputeHead,
    ComputeLayers,
    Drop,
    Message,
    MoveKV,
    NewCache,
    TakeHead,
    TakeLayers,
)
from forerun.ops.native.threads import lease_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsWorkerSpec(WorkerSpec):
    """What a worker on the kernels must know: how weights are packed, and its cores."""

    weight_format: str
    row_bits: int
    cores: list[int]


@dataclass(frozen=True, slots=True)
class OwnLayers:
    """A rank's part of some layers, and the KV of its heads."""

    part: LayersPart
    kv_specs: Sequence[LayerKVSpec]


@dataclass(frozen=True, slots=True)
class OwnCache:
    """A KV cache and the layers that it is for."""

    kv: KVCache
    addresses: CacheAddresses
    part: LayersPart


class Worker:
    """One rank's parts of the target and of drafters, its KV caches, and what it does with them."""

    def __init__(self, exchange: Exchange, decoder: Decoder, packing: Packing) -> None:
        shard = Shard(decoder.config, packing.rank, packing.num_ranks)
        assert isinstance(decoder.head, PackedHead)
        assert isinstance(decoder.layers, NativeLayers)
        self._exchange = exchange
        part = LayersPart(decoder.layers, shard.struct())
        own_head = packing.part_of_head(decoder.head.linear, shard)
        self._layers = {TARGET_LAYERS: OwnLayers(part, local_specs(decoder.kv_specs, len(shard.kv_heads)))}
        self._heads = {TARGET_HEAD: HeadPart.of(decoder.head, own_head, shard.head_tiles.start)}
        self._caches: dict[int, OwnCache] = {}
        self._device = decoder.device
        self._kernels = packing.kernels

    def begin(self) -> None:
        """See `Works`; there is nothing to wait for."""

    def obey(self, message: Message) -> None:
        """See `Works`."""
        match message:
            case ComputeLayers():
                own, rows = self._caches[message.cache], message.rows.struct()
                own.part.compute(
                    self._exchange,
                    message.rotations_of_pass(),
                    rows,
                    own.addresses,
                    message.first,
                    message.last,
                    kept=0,
                )
            case ComputeHead():
                head = self._heads[message.head]
                head.compute(self._exchange, message.num_rows, count=message.num_candidates)
            case MoveKV():
                sources, destinations = torch.from_numpy(message.sources), torch.from_numpy(message.destinations)
                self._caches[message.cache].kv.move(sources, destinations)
            case NewCache():
                self._caches[message.number] = self._new_cache(message)
            case TakeLayers():
                content: LayersContent = self._borrowed(message.places)
                self._layers[message.number] = OwnLayers(content.part(self._kernels), content.kv_specs)
            case TakeHead():
                self._heads[message.number] = self._borrowed(message.places)
            case Drop():
                for held in (self._layers, self._heads, self._caches):
                    held.pop(message.number, None)

    def _new_cache(self, message: NewCache) -> OwnCache:
        own = self._layers[message.layers]
        cache = KVCache(
            own.kv_specs,
            num_blocks=message.num_blocks,
            block_size=message.block_size,
            dtype=message.dtype,
            device=self._device,
        )
        return OwnCache(cache, CacheAddresses(cache), own.part)

    def _borrowed(self, places: Sequence[range]) -> Any:
        """What rank 0 has lent to this rank, copied."""
        return from_bytes(self._exchange.borrow(places[self._exchange.rank - 1]), Arena().empty)


def load_worker(line: str, descriptor: int) -> tuple[Exchange, Worker]:
    """Load a rank's part of the target.

    Raises:
        WorkerError: the files or the code are not those that rank 0 has loaded.
        ForerunError: the target cannot be loaded.
    """
    spec = KernelsWorkerSpec.from_json(line)
    kernels = kernels_of_level(spec.level)
    assert kernels is not None, "rank 0 computes on them"
    _bind(spec, kernels)
    spec.check_identity(spec.weight_format)
    packing = Packing(
        kernels,
        WEIGHT_FORMATS[spec.weight_format],
        row_bits=spec.row_bits,
        rank=spec.rank,
        num_ranks=spec.sizes.num_ranks,
    )
    model = LOADERS[spec.load_format](
        Path(spec.path),
        dtype=spec.torch_dtype,
        device=torch.device("cpu"),
        packing=packing,
        max_model_len=spec.max_model_len,
    )
    assert isinstance(model, Decoder), "rank 0 has checked it"
    exchange = Exchange(kernels, descriptor, spec.sizes, rank=spec.rank)
    return exchange, Worker(exchange, model, packing)


def _bind(spec: KernelsWorkerSpec, kernels: Kernels) -> None:
    """Compute on the cores that this rank has, if any were given to it."""
    torch.set_num_threads(1)
    cores = spec.cores if spec.cores and lease_cores(spec.cores) else []
    if cores:
        os.sched_setaffinity(0, cores)
    kernels.use_threads(spec.num_threads, cores=cores)


if __name__ == "__main__":
    sys.exit(run_worker(int(sys.argv[1]), load_worker))
