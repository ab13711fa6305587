"""Layers and heads in torch as rank 0 calls them: it tells the other ranks of a pass, then computes its own part."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from forerun.core.batch import SequenceRows
from forerun.kv.cache import KVCache
from forerun.models.column_parallel import ColumnParallelLinear
from forerun.models.decoder import TorchLayers
from forerun.models.layers import DecoderLayer
from forerun.ops.attention.paged import PagedPass
from forerun.ops.collectives import Collectives
from forerun.ops.layers import HeadProduct
from forerun.ops.native.sharded.exchange import Leader
from forerun.ops.native.sharded.layers import ShardedKVCache
from forerun.ops.native.sharded.messages import ComputeHead, NewCache
from forerun.ops.rotary import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePass:
    """Compute layers [first, last) of `layers` with a cache.

    What lies on the device comes by two broadcasts after the message: positions and slots, [2, num_rows] int64, and the
    input of layer `first`, [num_rows, width].
    """

    layers: int
    cache: int
    first: int
    last: int
    num_rows: int
    width: int
    sequences: Sequence[SequenceRows]
    block_size: int


class LeaderLayers:
    """`TorchLayers` that all ranks compute; the others know them by `number`."""

    def __init__(self, own: TorchLayers, collectives: Collectives, leader: Leader, *, number: int) -> None:
        """Compute layers whose part for rank 0 is `own`."""
        self.layers: Sequence[DecoderLayer] = own.layers
        self._own = own
        self._collectives = collectives
        self._leader = leader
        self._number = number
        self._caches: WeakKeyDictionary[KVCache, int] = WeakKeyDictionary()

    def __call__(
        self, hidden: Tensor, rotations: list[Rotation | None], attend: PagedPass, first: int, last: int
    ) -> Tensor:
        """See `Layers`.

        Raises:
            WorkerError: another rank has ended.
        """
        batch, cache = attend.batch, self._number_of(attend.cache)
        message = ComputePass(
            layers=self._number,
            cache=cache,
            first=first,
            last=last,
            num_rows=len(hidden),
            width=hidden.shape[1],
            sequences=batch.sequences,
            block_size=batch.block_size,
        )
        with self._leader as exchange:
            exchange.post(message)
            self._collectives.broadcast(torch.stack([batch.positions, batch.slot_mapping]))
            self._collectives.broadcast(hidden.contiguous())
            return self._own(hidden, rotations, attend, first, last)

    def _number_of(self, cache: KVCache) -> int:
        """The number of a cache; the other ranks make theirs of a drafter's at its first pass."""
        if isinstance(cache, ShardedKVCache):
            return cache.number
        number = self._caches.get(cache)
        if number is None:
            number = self._caches[cache] = self._leader.new_number()
            keys = cache.layers[0].key
            with self._leader as exchange:
                exchange.post(
                    NewCache(number, self._number, len(keys) // cache.block_size, cache.block_size, keys.dtype)
                )
            weakref.finalize(cache, self._leader.drop, number)
        return number


@dataclass(frozen=True, slots=True)
class LeaderProduct:
    """A head's product that all ranks compute; rank 0 keeps the whole of its weights, of which drafters ask for rows."""

    whole: HeadProduct
    part: ColumnParallelLinear
    collectives: Collectives
    leader: Leader
    number: int

    @property
    def num_bytes(self) -> int:
        """Bytes that a pass reads here."""
        return self.part.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, vocab_size]

        Raises:
            WorkerError: another rank has ended.
        """
        with self.leader as exchange:
            exchange.post(ComputeHead(self.number, len(x), 0))
            self.collectives.broadcast(x.contiguous())
            logits = self.part(x)
            self.collectives.finish()
        self.leader.check_health()  # where a rank was gone what came of an exchange between GPUs is nothing
        return logits

    def rows(self, outputs: Tensor) -> Tensor:
        """See `HeadProduct`."""
        return self.whole.rows(outputs)
