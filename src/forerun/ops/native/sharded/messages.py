"""What rank 0 asks of the other ranks: plain records, which are pickled into the shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.ops.rotary import Rotation


@dataclass(frozen=True, slots=True)
class NewCache:
    """Make a KV cache of this rank's heads."""

    number: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class DropCache:
    """Forget a KV cache."""

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

    num_rows: int
    num_candidates: int


@dataclass(frozen=True, slots=True)
class SequencePart:
    """A `SequenceRows`."""

    num_context: int
    num_rows: int
    block_ids: npt.NDArray[np.int32]
    tree_mask: npt.NDArray[np.bool_] | None
    num_hidden: int


@dataclass(frozen=True, slots=True)
class ComputeLayers:
    """Compute layers [first, last) on the rows in the exchange, with a cache; `rotations` are those of the pass."""

    cache: int
    first: int
    last: int
    block_size: int
    slots: npt.NDArray[np.int64]
    sequences: list[SequencePart]
    rotations: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None]

    @classmethod
    def of(
        cls, batch: ForwardBatch, rotations: list[Rotation | None], *, cache: int, first: int, last: int
    ) -> ComputeLayers:
        """The message for a pass."""
        return cls(
            cache,
            first,
            last,
            batch.block_size,
            batch.slot_mapping.numpy(),
            [
                SequencePart(
                    one.num_context,
                    one.num_rows,
                    one.block_ids,
                    None if one.tree_mask is None else one.tree_mask.numpy(),
                    one.num_hidden,
                )
                for one in batch.sequences
            ],
            [None if one is None else (one.cos.numpy(), one.sin.numpy()) for one in rotations],
        )

    def batch(self) -> ForwardBatch:
        """The pass's rows, as attention reads them; tokens and positions are rank 0's alone."""
        nothing = torch.empty(0, dtype=torch.int64)
        return ForwardBatch(
            token_ids=nothing,
            positions=nothing,
            slot_mapping=torch.from_numpy(self.slots),
            sequences=[
                SequenceRows(
                    num_context=one.num_context,
                    num_rows=one.num_rows,
                    block_ids=one.block_ids,
                    tree_mask=None if one.tree_mask is None else torch.from_numpy(one.tree_mask),
                    num_hidden=one.num_hidden,
                )
                for one in self.sequences
            ],
            block_size=self.block_size,
            logits_rows=nothing,
        )

    def rotations_of_pass(self) -> list[Rotation | None]:
        """The pass's rotations."""
        return [
            None if one is None else Rotation(torch.from_numpy(one[0]), torch.from_numpy(one[1]))
            for one in self.rotations
        ]


Message = NewCache | DropCache | MoveKV | ComputeHead | ComputeLayers
