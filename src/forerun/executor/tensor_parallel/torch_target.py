"""Loads a target of which torch computes a part in each of several processes: one for each GPU, or on the cores of a CPU."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import torch

from forerun.errors import ConfigError, ModelError
from forerun.executor.tensor_parallel import group
from forerun.executor.tensor_parallel.group import WorkerProcess
from forerun.executor.tensor_parallel.target import (
    MESSAGE_BYTES,
    PassLimits,
    ShardedCaches,
    ShardedTarget,
    shareable_config,
)
from forerun.executor.tensor_parallel.torch_layers import LeaderLayers, LeaderProduct
from forerun.executor.tensor_parallel.torch_worker import TORCH_WEIGHTS, LentLayers, TorchWorkerSpec
from forerun.executor.tensor_parallel.worker_process import identity_of
from forerun.models.column_parallel import ColumnParallel, ColumnParallelLinear, dense, head_shares
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder, Layers, TorchLayers
from forerun.models.loader import LOADERS
from forerun.ops.collectives import TorchCollectives
from forerun.ops.layers import Head, Linear
from forerun.ops.native.layers import PackedHead
from forerun.ops.native.library import load_kernels
from forerun.ops.native.sharded.contents import to_bytes
from forerun.ops.native.sharded.exchange import Exchange, ExchangeSizes, Leader, make_shared_memory
from forerun.ops.native.sharded.messages import TARGET_HEAD, TARGET_LAYERS, Nothing, TakeHead, TakeLayers
from forerun.ops.native.threads import threads_of_ranks


class TorchDrafterRanks:
    """The processes of a group, to which rank 0 hands a drafter that it has read; see `SharesOut`."""

    def __init__(self, columns: ColumnParallel, leader: Leader, *, num_ranks: int, num_kv_heads: int) -> None:
        """Hand out drafters; `num_kv_heads` of the target's are those for which one memory must have room."""
        self.num_ranks = num_ranks
        self.num_kv_heads = num_kv_heads
        self._columns = columns
        self._collectives = columns.collectives
        self._leader = leader

    def target(self, model: Decoder) -> Decoder:
        """The target itself: its logits are computed by all ranks, whoever asks."""
        return model

    def layers(self, layers: Layers, config: DecoderConfig) -> LeaderLayers:
        """Hand out a drafter's layers, of which rank 0's KV caches have room for all heads.

        Raises:
            ConfigError: so many ranks cannot share its heads out.
            WorkerError: another rank has ended.
        """
        assert isinstance(layers, TorchLayers)
        own = [self._columns.layer(layer, config) for layer in layers.layers]
        number = self._hand_out(
            TakeLayers,
            LentLayers(layers=layers.layers, config=config, dtype=dense(layers.layers[0].attention.qkv).weight.dtype),
        )
        shared = LeaderLayers(TorchLayers(own, layers.rotation_of), self._collectives, self._leader, number=number)
        weakref.finalize(shared, self._leader.drop, number)
        return shared

    def head(self, head: Head | PackedHead) -> Head:
        """Hand out a drafter's head.

        Raises:
            WorkerError: another rank has ended.
        """
        assert isinstance(head, Head)
        if isinstance(head.linear, LeaderProduct):
            return head
        assert isinstance(head.linear, Linear)
        number = self._hand_out(TakeHead, head.linear)
        part = self._columns.linear(head.linear)
        weakref.finalize(part.own.weight, self._leader.drop, number)
        return leader_head(head, part, self._leader, number)

    def _hand_out(self, message: type[TakeLayers] | type[TakeHead], content: LentLayers | Linear) -> int:
        """Give all ranks a content, of which each takes its part; returns the number that they know the part by."""
        number = self._leader.new_number()
        with self._leader as exchange:
            (place,) = exchange.lend([to_bytes(content)])
            exchange.post(message(number, [place] * (self.num_ranks - 1)))
            exchange.post(Nothing())  # which waits for the message before
            exchange.take_back()
        return number


def load_torch_target(
    path: Path,
    *,
    load_format: str,
    dtype: torch.dtype | None,
    device: torch.device,
    num_ranks: int,
    limits: PassLimits,
) -> ShardedTarget:
    """Load rank 0's part of a target here, and the other parts in processes of their own.

    Args:
        path: the model's folder or file.
        load_format: as in `EngineSettings`.
        dtype: of weights, activations and keys, or None for the checkpoint's.
        device: rank 0's; the others have the GPUs that follow.
        num_ranks: processes, this one included.
        limits: the largest pass.

    Raises:
        ConfigError: the model, the machine or the system does not have what so many ranks need.
        ModelError: the target cannot be loaded.
        WorkerError: another process cannot load its part.
    """
    config = shareable_config(path, num_ranks)
    shares = head_shares(config, num_ranks)
    devices = devices_of_ranks(device, num_ranks)
    kernels = load_kernels()
    if kernels is None:
        raise ConfigError(
            f"tensor_parallel_size: got {num_ranks}; the processes wait for each other in the native library, which is not "
            "built or switched off; install a C++ compiler and forerun again, or leave it out"
        )
    threads = [1] * num_ranks if device.type == "cuda" else [own.num_threads for own in threads_of_ranks(num_ranks)]
    sizes = exchange_sizes(num_ranks, limits, config)
    descriptor = make_shared_memory(sizes.offsets()[1])
    collectives = TorchCollectives(devices[0], rank=0, num_ranks=num_ranks)
    columns = ColumnParallel(collectives)
    workers: list[WorkerProcess] = []
    try:
        workers += (WorkerProcess(rank, descriptor, group.TORCH) for rank in range(1, num_ranks))
        exchange = Exchange(kernels, descriptor, sizes, rank=0)
        if device.type == "cpu":
            weakref.finalize(exchange, torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(threads[0])
        model = LOADERS[load_format](
            path, dtype=dtype, device=devices[0], columns=columns, max_model_len=limits.max_model_len
        )
        if not isinstance(model, Decoder):
            raise ModelError(f"tensor_parallel_size: got {num_ranks}, but {path} runs through transformers' own code")
        identity = identity_of(path, weight_format=TORCH_WEIGHTS, level=kernels.level, dtype=model.dtype)
        for worker in workers:
            worker.send(
                TorchWorkerSpec(
                    rank=worker.rank,
                    path=str(path.absolute()),
                    load_format=load_format,
                    max_model_len=limits.max_model_len,
                    dtype=str(model.dtype).removeprefix("torch."),
                    device=str(devices[worker.rank]),
                    port=collectives.port,
                    level=kernels.level,
                    sizes=sizes,
                    num_threads=threads[worker.rank],
                    identity=identity,
                )
            )
        for worker in workers:
            worker.wait_until_ready()
        collectives.connect()
    except BaseException:
        group.end(workers)
        raise
    finally:
        os.close(descriptor)
    leader = Leader(exchange)
    group.watch(leader, workers, collectives.abort)
    own_heads = [len(share.kv_heads) for share in shares]
    return ShardedTarget(
        _with_leader(model, columns, leader),
        ShardedCaches(leader, own_heads[0]),
        TorchDrafterRanks(
            columns,
            leader,
            num_ranks=num_ranks,
            num_kv_heads=max(own_heads) if device.type == "cuda" else sum(own_heads),
        ),
    )


def devices_of_ranks(device: torch.device, num_ranks: int) -> list[torch.device]:
    """A device for each rank: the GPUs from rank 0's on, or the CPU.

    Raises:
        ConfigError: there are not so many.
    """
    if device.type != "cuda":
        return [device] * num_ranks
    first, count = device.index or 0, torch.cuda.device_count()
    if first + num_ranks > count:
        raise ConfigError(
            f"tensor_parallel_size: got {num_ranks}, each on a GPU of its own, and from {device} on there are {count - first}; "
            f"lower it to {count - first}, or unset CUDA_VISIBLE_DEVICES"
        )
    return [torch.device("cuda", first + rank) for rank in range(num_ranks)]


def exchange_sizes(num_ranks: int, limits: PassLimits, config: DecoderConfig) -> ExchangeSizes:
    """Room for messages alone: what is computed is exchanged by collectives."""
    num_blocks = (limits.max_model_len or config.max_model_len) // limits.block_size + 2
    return ExchangeSizes(
        num_ranks=num_ranks,
        num_threads=1,
        max_rows=1,
        input_width=1,
        attended_width=0,
        gated_width=0,
        heads_width=0,
        vocab_size=1,
        head_rows=1,
        element_bytes=1,
        message_bytes=MESSAGE_BYTES + limits.max_rows * limits.max_rows + limits.max_num_seqs * num_blocks * 4,
    )


def leader_head(head: Head, part: ColumnParallelLinear, leader: Leader, number: int) -> Head:
    """A head that all ranks compute; rank 0 keeps its weights, whose other rows drafters may ask for."""
    product = LeaderProduct(head.linear, part, part.collectives, leader, number)
    return Head(product, head.scale, head.soft_cap)


def _with_leader(model: Decoder, columns: ColumnParallel, leader: Leader) -> Decoder:
    """The decoder with layers and a head that ask the other ranks; its embedding is rank 0's."""
    head, layers = model.head, model.layers
    assert isinstance(head, Head)
    assert isinstance(head.linear, Linear)
    assert isinstance(layers, TorchLayers)
    return model.with_parts(
        layers=LeaderLayers(layers, columns.collectives, leader, number=TARGET_LAYERS),
        head=leader_head(head, columns.linear(head.linear), leader, TARGET_HEAD),
    )
