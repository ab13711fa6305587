"""Loads a target whose layers and head several processes compute, and makes the KV caches that go with it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from forerun.core.batch import LayerKVSpec
from forerun.errors import ConfigError, ModelError
from forerun.executor.tensor_parallel import group
from forerun.executor.tensor_parallel.drafter_ranks import DrafterRanks
from forerun.executor.tensor_parallel.group import WorkerProcess
from forerun.executor.tensor_parallel.worker import KernelsWorkerSpec
from forerun.executor.tensor_parallel.worker_process import identity_of, local_specs
from forerun.kv.cache import KVCache
from forerun.models.base import SharesOut
from forerun.models.config import DecoderConfig
from forerun.models.config_file import read_config
from forerun.models.decoder import Decoder
from forerun.models.families import decoder_config, supports
from forerun.models.loader import LOADERS
from forerun.models.packing import Packing, can_pack
from forerun.models.sharding import Shard
from forerun.ops.native.layers import NativeLayers, PackedHead
from forerun.ops.native.sharded.exchange import Exchange, ExchangeSizes, Leader, make_shared_memory
from forerun.ops.native.sharded.layers import HeadPart, ShardedHead, ShardedKVCache, ShardedLayers
from forerun.ops.native.sharded.messages import TARGET_HEAD, TARGET_LAYERS, NewCache
from forerun.ops.native.threads import RankThreads, lease_cores, threads_of_ranks

HEAD_ROWS = 32  # of logits that are gathered at once
DRAFT_VOCABULARY = 1 << 18  # of drafters that several processes compute; memory is taken as it is used
MESSAGE_BYTES = 16 << 20  # beside what grows with a pass's rows and tables; memory is taken as it is used


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLimits:
    """What a pass of the engine may be: rows, sequences, and tokens of the longest, which None leaves to the model."""

    max_rows: int
    max_num_seqs: int
    max_model_len: int | None
    block_size: int


class ShardedCaches:
    """Makes the target's KV caches, of which each rank holds its own heads, under the same blocks."""

    def __init__(self, leader: Leader, num_kv_heads: int) -> None:
        """Make caches of which rank 0 holds so many heads."""
        self._leader = leader
        self._num_kv_heads = num_kv_heads

    def __call__(
        self,
        specs: Sequence[LayerKVSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        feature_widths: Mapping[str, int] | None = None,
    ) -> KVCache:
        """Make a cache; see `KVCache`. Features are rank 0's alone.

        Raises:
            WorkerError: another rank has ended.
        """
        local = KVCache(
            local_specs(specs, self._num_kv_heads),
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            device=device,
            feature_widths=feature_widths,
        )
        number = self._leader.new_number()
        with self._leader as exchange:
            exchange.post(NewCache(number, TARGET_LAYERS, num_blocks, block_size, dtype))
        cache = ShardedKVCache(self._leader, number, local)
        weakref.finalize(cache, self._leader.drop, number)
        return cache


@dataclass(frozen=True, slots=True)
class ShardedTarget:
    """A decoder whose layers and head all ranks compute, what makes its KV caches, and what hands drafters to the ranks."""

    model: Decoder
    make_cache: ShardedCaches
    drafter_ranks: SharesOut


def load_sharded_target(
    path: Path, *, load_format: str, dtype: torch.dtype | None, packing: Packing, num_ranks: int, limits: PassLimits
) -> ShardedTarget:
    """Load rank 0's part of a target here, and the other parts in processes of their own.

    Args:
        path: the model's folder or file.
        load_format: as in `EngineSettings`.
        dtype: of activations and keys.
        packing: the kernels, and the format of the weights.
        num_ranks: processes, this one included.
        limits: the largest pass.

    Raises:
        ConfigError: the model, the machine or the system does not have what so many ranks need.
        ModelError: the target cannot be loaded.
        WorkerError: another process cannot load its part.
    """
    config = checked_config(path, num_ranks)
    threads = threads_of_ranks(num_ranks)
    sizes = exchange_sizes(config, packing, threads, limits)
    descriptor = make_shared_memory(sizes.offsets()[1])
    workers: list[WorkerProcess] = []
    try:
        workers += (WorkerProcess(rank, descriptor) for rank in range(1, num_ranks))
        exchange = Exchange(packing.kernels, descriptor, sizes, rank=0)
        first = threads[0]
        packing.kernels.use_threads(
            first.num_threads, cores=first.cores if first.cores and lease_cores(first.cores) else []
        )
        own = packing.for_rank(0, num_ranks)
        model = LOADERS[load_format](
            path, dtype=dtype, device=torch.device("cpu"), packing=own, max_model_len=limits.max_model_len
        )
        if not isinstance(model, Decoder):
            raise ModelError(f"tensor_parallel_size: got {num_ranks}, but {path} runs through transformers' own code")
        _load_workers(workers, path, load_format, model, packing, sizes, threads, limits)
    except BaseException:
        group.end(workers)
        raise
    finally:
        os.close(descriptor)
    leader = Leader(exchange)
    group.watch(leader, workers)
    shard = Shard(model.config, 0, num_ranks)
    return ShardedTarget(
        _with_leader(model, own, shard, leader),
        ShardedCaches(leader, len(shard.kv_heads)),
        DrafterRanks(leader, packing.kernels, model.config, num_ranks),
    )


def shareable_config(path: Path, num_ranks: int) -> DecoderConfig:
    """The configuration of a model that computes in parts.

    Raises:
        ConfigError: it runs through transformers' own code, or has experts.
    """
    hf_config = read_config(path)
    if not supports(hf_config):
        architecture = (getattr(hf_config, "architectures", None) or ["none"])[0]
        raise ConfigError(
            f"tensor_parallel_size: got {num_ranks}, but architecture {architecture!r} runs through transformers' own code, "
            "which computes in one process; leave it out"
        )
    config = decoder_config(hf_config)
    if config.experts is not None:
        raise ConfigError(
            f"tensor_parallel_size: got {num_ranks}, but a mixture of experts computes in one process; leave it out"
        )
    return config


def checked_config(path: Path, num_ranks: int) -> DecoderConfig:
    """The configuration of a model that so many ranks can compute on the kernels.

    Raises:
        ConfigError: they cannot; the message says how many can.
    """
    config = shareable_config(path, num_ranks)
    if not can_pack(config):
        raise ConfigError(
            f"tensor_parallel_size: got {num_ranks}, but the native kernels need even widths; got hidden_size="
            f"{config.hidden_size}, intermediate_size={config.intermediate_size}, head_dim={config.head_dim}; leave it out"
        )
    Shard(config, 0, num_ranks)  # checks the heads
    return config


def exchange_sizes(
    config: DecoderConfig, packing: Packing, threads: Sequence[RankThreads], limits: PassLimits
) -> ExchangeSizes:
    """The room that a group needs for passes within `limits`."""
    rows, shard = limits.max_rows, Shard(config, 0, len(threads))
    num_ropes = len({rope for rope in config.ropes if rope is not None})
    num_blocks = (limits.max_model_len or config.max_model_len) // limits.block_size + 2
    return ExchangeSizes(
        num_ranks=len(threads),
        num_threads=threads[0].num_threads,
        max_rows=rows,
        input_width=2 * config.hidden_size,  # heads read an embedding and a state
        attended_width=config.num_heads * config.head_dim,
        gated_width=config.intermediate_size,
        heads_width=(config.num_heads + config.num_kv_heads) * config.head_dim if shard.norms_all_heads else 0,
        vocab_size=max(config.vocab_size, DRAFT_VOCABULARY),
        head_rows=HEAD_ROWS,
        element_bytes=packing.format.activations.itemsize,
        message_bytes=MESSAGE_BYTES
        + rows * (rows + 4 * num_ropes * config.head_dim + 8)  # masks, rotations, slots
        + limits.max_num_seqs * num_blocks * 4,
    )


def _load_workers(
    workers: Sequence[WorkerProcess],
    path: Path,
    load_format: str,
    model: Decoder,
    packing: Packing,
    sizes: ExchangeSizes,
    threads: Sequence[RankThreads],
    limits: PassLimits,
) -> None:
    """Let the workers load their parts; rank 0 has its own by now, and has kept the packed weights for all."""
    name, level = packing.format.name, packing.kernels.level
    identity = identity_of(path, weight_format=name, level=level, dtype=model.dtype)
    for worker in workers:
        own = threads[worker.rank]
        worker.send(
            KernelsWorkerSpec(
                rank=worker.rank,
                path=str(path.absolute()),
                load_format=load_format,
                max_model_len=limits.max_model_len,
                dtype=str(model.dtype).removeprefix("torch."),
                weight_format=name,
                row_bits=packing.row_bits,
                level=level,
                sizes=sizes,
                num_threads=own.num_threads,
                cores=own.cores,
                identity=identity,
            )
        )
    for worker in workers:
        worker.wait_until_ready()


def _with_leader(model: Decoder, packing: Packing, shard: Shard, leader: Leader) -> Decoder:
    """The decoder with layers and a head that ask the other ranks; its embedding and its whole head are rank 0's."""
    head, layers = model.head, model.layers
    assert isinstance(head, PackedHead)
    assert isinstance(layers, NativeLayers)
    part = HeadPart.of(head, packing.part_of_head(head.linear, shard), shard.head_tiles.start)
    return model.with_parts(
        layers=ShardedLayers(layers, shard.struct(), leader, number=TARGET_LAYERS),
        head=ShardedHead(
            linear=head.linear, scale=head.scale, soft_cap=head.soft_cap, part=part, leader=leader, number=TARGET_HEAD
        ),
    )
