"""What rank 0 asks of the other ranks: plain records, which are pickled into the shared memory.

Layers, heads and caches have numbers that rank 0 gives them; the target's layers are `TARGET_LAYERS`, its head `TARGET_HEAD`.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from forerun.ops.native.attention import NativePass
from forerun.ops.native.structs import SEQUENCE_WORDS, PassStruct
from forerun.ops.rotary import Rotation

TARGET_LAYERS, TARGET_HEAD, FIRST_FREE_NUMBER = 0, 1, 2


@dataclass(frozen=True, slots=True)
class TakeLayers:
    """Keep this rank's part of some layers: of each rank from 1 on where its `LayersContent` is, see `Exchange.lend`."""

    number: int
    places: Sequence[range]


@dataclass(frozen=True, slots=True)
class TakeHead:
    """Keep this rank's part of a head: of each rank from 1 on where its `HeadPart` is."""

    number: int
    places: Sequence[range]


@dataclass(frozen=True, slots=True)
class Nothing:
    """Do nothing: rank 0 posts it to wait until all ranks have carried out the message before."""


@dataclass(frozen=True, slots=True)
class NewCache:
    """Make a KV cache for this rank's part of some layers."""

    number: int
    layers: int
    num_blocks: int
    block_size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the layers, the head or the cache of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class MoveKV:
    """Copy what lies at slots `sources` of a cache to slots `destinations`, [n] int64 both."""

    cache: int
    sources: npt.NDArray[np.int64]
    destinations: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ComputeHead:
    """Compute this rank's logits of the rows in the exchange, and the likeliest of them."""

    head: int
    num_rows: int
    num_candidates: int


@dataclass(frozen=True, slots=True)
class PassArrays:
    """A pass without addresses, in few arrays: a record for each sequence would take a rank longer to read than layers take.

    Attributes:
        slots: [T] int64.
        sequences: [S, SEQUENCE_WORDS] int64, `Sequence` of csrc/attention.h. In place of addresses they have where the
            sequence's blocks begin in `block_ids`, and its mask in `masks` if `mask_width` is not 0.
        block_ids: of all sequences, int32.
        masks: of all sequences that have one, row by row.
        block_size: of the cache.
    """

    slots: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64]
    block_ids: npt.NDArray[np.int32]
    masks: npt.NDArray[np.bool_]
    block_size: int

    @classmethod
    def of(cls, attend: NativePass) -> PassArrays:
        """The arrays of a pass."""
        masks = [np.empty(0, np.bool_) if mask is None else mask.numpy().ravel() for mask in attend.masks]
        sequences = np.array(attend.sequences, dtype=np.int64).reshape(-1, SEQUENCE_WORDS)
        sequences[:, BLOCKS] = _begins(attend.tables)
        sequences[:, MASK] = _begins(masks)
        return cls(
            attend.batch.slot_mapping.numpy(),
            sequences,
            np.concatenate(attend.tables) if attend.tables else np.empty(0, np.int32),
            np.concatenate(masks) if masks else np.empty(0, np.bool_),
            attend.batch.block_size,
        )

    def struct(self) -> PassStruct:
        """The pass as the kernels read it, as long as this record lives; to be called once."""
        sequences = self.sequences
        sequences[:, BLOCKS] = self.block_ids.ctypes.data + sequences[:, BLOCKS] * self.block_ids.itemsize
        is_tree = sequences[:, MASK_WIDTH] != 0
        sequences[:, MASK] = np.where(is_tree, self.masks.ctypes.data + sequences[:, MASK], 0)
        return PassStruct(
            num_rows=len(self.slots),
            slots=self.slots.ctypes.data,
            num_sequences=len(sequences),
            sequences=sequences.ctypes.data,
            block_size=self.block_size,
        )


BLOCKS, MASK, MASK_WIDTH = 3, 4, 5
"""Words of a `Sequence` of csrc/attention.h."""


def _begins(arrays: Sequence[Sized]) -> list[int]:
    """Where each array begins among all, one after the other."""
    begins, end = [], 0
    for array in arrays:
        begins.append(end)
        end += len(array)
    return begins


@dataclass(frozen=True, slots=True)
class ComputeLayers:
    """Compute layers [first, last) on the rows in the exchange, with a cache; `rotations` are those of the pass."""

    cache: int
    first: int
    last: int
    rows: PassArrays
    rotations: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None]

    @classmethod
    def of(
        cls, attend: NativePass, rotations: list[Rotation | None], *, cache: int, first: int, last: int
    ) -> ComputeLayers:
        """The message for a pass."""
        arrays = [None if one is None else (one.cos.numpy(), one.sin.numpy()) for one in rotations]
        return cls(cache, first, last, PassArrays.of(attend), arrays)

    def rotations_of_pass(self) -> list[Rotation | None]:
        """The pass's rotations."""
        return [
            None if one is None else Rotation(torch.from_numpy(one[0]), torch.from_numpy(one[1]))
            for one in self.rotations
        ]


Message = TakeLayers | TakeHead | Nothing | NewCache | Drop | MoveKV | ComputeHead | ComputeLayers
