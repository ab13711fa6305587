"""Hands parts of drafters' layers and heads to the processes that compute a target, so that all of them compute drafts, too."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from forerun.core.batch import LayerKVSpec
from forerun.errors import ConfigError
from forerun.executor.tensor_parallel.worker_process import local_specs
from forerun.models.config import DecoderConfig
from forerun.models.decoder import Decoder, Layers
from forerun.models.sharding import Shard, part_of_layer, tiles_of
from forerun.ops.layers import Head
from forerun.ops.native.layers import NativeLayer, NativeLayers, PackedHead
from forerun.ops.native.library import Kernels
from forerun.ops.native.memory import Arena
from forerun.ops.native.sharded.contents import LayersContent, to_bytes
from forerun.ops.native.sharded.exchange import ExchangeSizes, Leader
from forerun.ops.native.sharded.layers import HeadPart, ShardedDraftHead, ShardedDraftLayers, ShardedHead
from forerun.ops.native.sharded.messages import Nothing, TakeHead, TakeLayers
from forerun.ops.native.sharded.weights import take_tiles


class DrafterRanks:
    """The processes of a group, to which rank 0 hands a drafter that it has read; see `SharesOut`.

    Rank 0 packs each rank's part and lends it through the shared memory, so that the others need to know nothing of the
    files and layouts of drafters.
    """

    def __init__(self, leader: Leader, kernels: Kernels, config: DecoderConfig, num_ranks: int) -> None:
        """Hand out drafters of the target of this configuration."""
        self.num_ranks = num_ranks
        self.num_kv_heads = sum(len(Shard(config, rank, num_ranks).kv_heads) for rank in range(num_ranks))
        self._leader = leader
        self._kernels = kernels

    def target(self, model: Decoder) -> Decoder:
        """The target as its drafters call it: they have its logits computed by all ranks."""
        assert isinstance(model.head, ShardedHead)
        return model.with_parts(layers=model.layers, head=self.head(model.head))

    def layers(self, layers: Layers, config: DecoderConfig) -> ShardedDraftLayers:
        """Hand out a drafter's layers.

        Raises:
            ConfigError: they are not packed, have experts, have fewer query heads than there are ranks, or are wider than the
                target's.
            ModelError: a weight in several block formats cannot be shared out.
            WorkerError: another rank has ended.
        """
        if not isinstance(layers, NativeLayers):
            raise ConfigError(
                f"draft_tensor_parallel_size: got {self.num_ranks}, but the native kernels need even widths for the drafter's "
                "layers; set it to 1"
            )
        if config.experts is not None:
            raise ConfigError(
                f"draft_tensor_parallel_size: got {self.num_ranks}, but a mixture of experts computes in one process; set it to 1"
            )
        first = layers.layers[0].struct
        self._check_room("a layer's input", first.beside_width + first.width, self._sizes.input_width)
        self._check_room("heads", config.num_heads * config.head_dim, self._sizes.attended_width)
        self._check_room("gates", config.intermediate_size, self._sizes.gated_width)
        shards = [Shard(config, rank, self.num_ranks) for rank in range(self.num_ranks)]
        if shards[0].norms_all_heads:
            width = (config.num_heads + config.num_kv_heads) * config.head_dim
            self._check_room("queries and keys", width, self._sizes.heads_width)
        spec = LayerKVSpec(num_kv_heads=config.num_kv_heads, key_dim=config.head_dim, value_dim=config.head_dim)

        def part(shard: Shard) -> list[NativeLayer]:
            arena = Arena()
            return [part_of_layer(self._kernels, layer, shard, arena) for layer in layers.layers]

        number = self._hand_out(
            TakeLayers,
            [
                to_bytes(
                    LayersContent.of(
                        part(shard),
                        layers.rotation_of,
                        shard.struct(),
                        local_specs([spec] * len(layers.layers), len(shard.kv_heads)),
                    )
                )
                for shard in shards[1:]
            ],
        )
        own = NativeLayers(self._kernels, part(shards[0]), layers.rotation_of)
        return ShardedDraftLayers(own, shards[0].struct(), self._leader, number=number)

    def head(self, head: Head | PackedHead) -> ShardedDraftHead:
        """Hand out a drafter's head, of which rank 0 keeps the whole, too; the ranks have their parts of the target's already.

        Raises:
            ConfigError: it is larger than the target's.
            WorkerError: another rank has ended.
        """
        assert isinstance(head, PackedHead), "the kernels have heads of any width"
        if isinstance(head, ShardedHead):
            return _draft_head(head, head.part, self._leader, head.number)
        weight = head.linear.weight
        self._check_room("head's input", weight.inputs, self._sizes.input_width)
        self._check_room("vocabulary", weight.outputs, self._sizes.vocab_size)
        parts = []
        for rank in range(self.num_ranks):
            tiles = tiles_of(weight.outputs, rank, self.num_ranks)
            parts.append(HeadPart.of(head, take_tiles(weight, [tiles], Arena()), tiles.start))
        number = self._hand_out(TakeHead, [to_bytes(part) for part in parts[1:]])
        weakref.finalize(parts[0].weight.data, self._leader.drop, number)
        return _draft_head(head, parts[0], self._leader, number)

    @property
    def _sizes(self) -> ExchangeSizes:
        return self._leader.exchange.sizes

    def _check_room(self, what: str, width: int, room: int) -> None:
        """Raise `ConfigError` where the shared memory has no room for what ranks would exchange."""
        if width > room:
            raise ConfigError(
                f"draft_tensor_parallel_size: got {self.num_ranks}, but the drafter's {what} has {width} values and the "
                f"processes share memory for {room}, as the target has; set it to 1"
            )

    def _hand_out(self, message: type[TakeLayers] | type[TakeHead], contents: Sequence[bytes]) -> int:
        """Give each rank from 1 on its content, and wait until it has it; returns the number that all know it by."""
        number = self._leader.new_number()
        with self._leader as exchange:
            exchange.post(message(number, exchange.lend(contents)))
            exchange.post(Nothing())  # which waits for the message before
            exchange.take_back()
        return number


def _draft_head(head: PackedHead, part: HeadPart, leader: Leader, number: int) -> ShardedDraftHead:
    return ShardedDraftHead(
        linear=head.linear, scale=head.scale, soft_cap=head.soft_cap, part=part, leader=leader, number=number
    )
