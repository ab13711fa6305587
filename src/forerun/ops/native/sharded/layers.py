"""Decoder layers and a head that several processes compute together; the twins are `NativeLayers` and `PackedHead`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from forerun.core.batch import Candidates, CandidateTensors
from forerun.errors import ConfigError
from forerun.kv.cache import KVCache
from forerun.ops.native.attention import CacheAddresses, NativePass, rotation_structs
from forerun.ops.native.formats.base import PackedWeight
from forerun.ops.native.layers import NO_LAYERS, NativeLayers, PackedHead
from forerun.ops.native.sharded.exchange import Exchange, Leader
from forerun.ops.native.sharded.messages import ComputeHead, ComputeLayers, MoveKV, NewCache
from forerun.ops.native.structs import TILE, LayerShardStruct, PassStruct
from forerun.ops.rotary import Rotation


@dataclass(frozen=True, slots=True)
class LayersPart:
    """One rank's part of the layers: its weights, and where its outputs lie among all."""

    layers: NativeLayers
    shard: LayerShardStruct

    def compute(
        self,
        exchange: Exchange,
        rotations: list[Rotation | None],
        rows: PassStruct,
        addresses: CacheAddresses,
        first: int,
        last: int,
        kept: int,
    ) -> Tensor:
        """Compute layers [first, last) on the rows in the exchange; every rank calls this for the same pass.

        Returns:
            The residual stream [T, width] fp32; every rank has it.

        Raises:
            WorkerError: a rank has ended.
        """
        out = torch.empty(rows.num_rows, self.layers.width, dtype=torch.float32)
        keys, values = addresses.arrays(first)
        structs, rotation_of = self.layers.places_from(first)
        exchange.kernels.sharded_layers(
            *(exchange.struct, self.shard, structs, last - first, rows),
            *(rotation_structs(rotations), rotation_of, addresses.storage, keys, values, kept or None),
            out.data_ptr(),
        )
        return out


@dataclass(frozen=True, slots=True)
class HeadPart:
    """One rank's part of a head over `vocab_size` tokens: the logits from `first_output` on."""

    weight: PackedWeight
    first_output: int
    vocab_size: int
    factor: float
    cap: float

    @classmethod
    def of(cls, head: PackedHead, own: PackedWeight, first_tile: int) -> HeadPart:
        """The part of a head whose outputs from tile `first_tile` on are `own`."""
        return cls(own, first_tile * TILE, head.linear.weight.outputs, head.scale, head.soft_cap or 0.0)

    def compute(
        self,
        exchange: Exchange,
        num_rows: int,
        *,
        out: Tensor | None = None,
        found: Candidates | None = None,
        count: int,
    ) -> None:
        """Compute the logits of the rows in the exchange; rank 0 gets those of all ranks in `out`, and the likeliest in `found`.

        Raises:
            WorkerError: a rank has ended.
        """
        exchange.kernels.sharded_head(
            *(exchange.struct, self.weight.struct, self.first_output, num_rows, self.weight.inputs, self.vocab_size),
            *(self.factor, self.cap, None if out is None else out.data_ptr(), count),
            *((None, None) if found is None else (found.token_ids.data_ptr(), found.logits.data_ptr())),
        )


class ShardedLayers(NativeLayers):
    """Layers as rank 0 calls them: it asks the other ranks, which know them by `number`, for their parts and computes its own."""

    def __init__(self, layers: NativeLayers, shard: LayerShardStruct, leader: Leader, *, number: int) -> None:
        """Compute layers whose part for rank 0 is `layers`."""
        super().__init__(layers.kernels, layers.layers, layers.rotation_of)
        self.leader = leader
        self.number = number
        self._part = LayersPart(layers, shard)

    def __call__(
        self,
        hidden: Tensor,
        rotations: list[Rotation | None],
        attend: NativePass,
        first: int,
        last: int,
        keep: frozenset[int] = NO_LAYERS,
    ) -> Tensor:
        """See `NativeLayers`; the other ranks must have their part of the pass's cache.

        Raises:
            WorkerError: another rank has ended.
        """
        rows = hidden.float().contiguous()
        cache = self._number_of(attend.cache)
        with self.leader as exchange:
            exchange.post(ComputeLayers.of(attend, rotations, cache=cache, first=first, last=last), rows)
            kept = attend.addresses.kept(keep) if keep else 0
            return self._part.compute(exchange, rotations, attend.struct, attend.addresses, first, last, kept)

    def _number_of(self, cache: KVCache) -> int:
        if not isinstance(cache, ShardedKVCache):
            raise TypeError("the target's layers attend to a sharded cache only")
        return cache.number


class ShardedDraftLayers(ShardedLayers):
    """A drafter's layers. It makes its cache as if all heads were here, and the other ranks make theirs at its first pass.

    Of each slot rank 0 then uses the beginning; the system gives no memory for the rest.
    """

    def __init__(self, layers: NativeLayers, shard: LayerShardStruct, leader: Leader, *, number: int) -> None:
        """See `ShardedLayers`."""
        super().__init__(layers, shard, leader, number=number)
        self._caches: WeakKeyDictionary[KVCache, int] = WeakKeyDictionary()
        weakref.finalize(self, leader.drop, number)

    def _number_of(self, cache: KVCache) -> int:
        number = self._caches.get(cache)
        if number is None:
            number = self._caches[cache] = self.leader.new_number()
            num_slots, block_size = len(cache.layers[0].key), cache.block_size
            with self.leader as exchange:
                exchange.post(
                    NewCache(number, self.number, num_slots // block_size, block_size, cache.layers[0].key.dtype)
                )
            weakref.finalize(cache, self.leader.drop, number)
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedHead(PackedHead):
    """The target's head as rank 0 calls it.

    A pass's logits, `with_candidates`, are computed by all ranks. All else, which drafters ask for, is computed by rank
    0 alone, which holds the whole head.
    """

    part: HeadPart
    leader: Leader
    number: int

    def with_candidates(self, normed: Tensor, num_candidates: int) -> tuple[Tensor, Candidates]:
        """See `PackedHead`.

        Raises:
            WorkerError: another rank has ended.
        """
        rows = normed.float().contiguous()
        out = torch.empty(len(rows), self.linear.weight.outputs, dtype=torch.float32)
        found = CandidateTensors(
            torch.empty(len(rows), num_candidates, dtype=torch.int32),
            torch.empty(len(rows), num_candidates, dtype=torch.float32),
        )
        if len(rows):
            with self.leader as exchange:
                exchange.post(ComputeHead(self.number, len(rows), num_candidates), rows)
                self.part.compute(exchange, len(rows), out=out, found=found, count=num_candidates)
        return out, found


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedDraftHead(ShardedHead):
    """A head as a drafter calls it that all ranks compute."""

    def __call__(self, normed: Tensor) -> Tensor:
        """See `PackedHead`."""
        return self.with_candidates(normed, 0)[0]

    def candidates(self, normed: Tensor, num_candidates: int) -> Candidates:
        """See `PackedHead`."""
        return self.with_candidates(normed, num_candidates)[1]


class ShardedKVCache(KVCache):
    """Rank 0's heads of a KV cache; the other ranks keep theirs under the same slots and number."""

    def __init__(self, leader: Leader, number: int, local: KVCache) -> None:
        """Take over a cache of rank 0's heads, which the other ranks make, too."""
        self.__dict__.update(local.__dict__)
        self.number = number
        self._leader = leader

    def check_health(self) -> None:
        """See `KVCache`.

        Raises:
            WorkerError: another rank has ended.
        """
        self._leader.check_health()

    def read(self, slots: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Refuse: the other ranks' heads are not here.

        Raises:
            ConfigError: always.
        """
        raise _refused()

    def write(self, slots: Tensor, contents: Sequence[Tensor]) -> None:  # noqa: ARG002
        """Refuse: the other ranks' heads are not here.

        Raises:
            ConfigError: always.
        """
        raise _refused()

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """See `KVCache`; all ranks move what is theirs.

        Raises:
            WorkerError: another rank has ended.
        """
        with self._leader as exchange:
            exchange.post(MoveKV(self.number, sources.cpu().numpy(), destinations.cpu().numpy()))
            super().move(sources, destinations)


def _refused() -> ConfigError:
    return ConfigError(
        "KV transfer: the KV of an engine with tensor_parallel_size above 1 lies in several processes and cannot be handed "
        "over; set tensor_parallel_size to 1"
    )
