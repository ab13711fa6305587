"""A decoder's whole pass in one call of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import pointer
from typing import Any

import torch
from torch import Tensor

from forerun.core.batch import CandidateArrays, ForwardBatch, ForwardResult
from forerun.ops.layers import Embedding
from forerun.ops.native.attention import NativePass, int64_address
from forerun.ops.native.inputs import RotationTables, token_table
from forerun.ops.native.layers import NativeLayers, NativeRMSNorm, PackedEmbedding, PackedHead
from forerun.ops.native.structs import DecoderStruct
from forerun.ops.rotary import RotaryTable


class WholePass:
    """From token ids to logits: the twin of calling embedding, layers, norm and head one by one, with the same bits.

    Between two of these calls Python takes longer than the kernels for all but the layers, since the pass before has left
    none of its code in the processor's caches.
    """

    def __init__(
        self,
        *,
        embedding: PackedEmbedding | Embedding,
        layers: NativeLayers,
        num_layers: int,
        rotaries: Sequence[RotaryTable],
        norm: NativeRMSNorm,
        head: PackedHead,
    ) -> None:
        """Only the first `num_layers` layers are computed; `rotaries` are those that they take from number 1 on."""
        self._parts = (embedding, layers, norm, head)  # keeps the memory alive whose addresses are in the struct
        self._kernels = layers.kernels
        self._num_outputs = head.linear.weight.outputs
        structs, rotation_of = layers.places
        self._struct = DecoderStruct(
            embedding=token_table(embedding),
            layers=structs,
            rotation_of=rotation_of,
            num_layers=num_layers,
            output_norm=norm.weight.data_ptr(),
            vocabulary=pointer(head.linear.weight.struct),
            num_outputs=self._num_outputs,
            norm_eps=norm.eps,
            logit_factor=head.scale,
            logit_cap=head.soft_cap or 0.0,
        )
        self._rotations = RotationTables(rotaries)

    def __call__(self, batch: ForwardBatch, attend: NativePass, keep: frozenset[int]) -> ForwardResult:
        """Compute a pass that asks for one candidate at least; the residual streams before the layers of `keep` go to the cache."""
        num_rows, count = batch.logits_rows.numel(), batch.num_candidates
        logits = batch.logits
        if logits is None or logits.numel() != num_rows * self._num_outputs:
            logits = torch.empty(num_rows, self._num_outputs, dtype=torch.float32)
        found = CandidateArrays(num_rows, count)
        addresses, tables = attend.addresses, self._rotations.of_first(attend.num_positions)
        self._kernels.decode(
            *(self._struct, tables.structs, tables.num_tables, attend.struct),
            *(int64_address(batch.token_ids), int64_address(batch.positions), addresses.storage, *addresses.arrays(0)),
            *(addresses.kept(keep) if keep else None, int64_address(batch.logits_rows), num_rows),
            *(count, logits.data_ptr(), found.ids.buffer_info()[0], found.values.buffer_info()[0]),
        )
        return ForwardResult(logits=logits, candidates=found)


def whole_pass(
    embedding: Callable[[Tensor], Tensor],
    layers: Any,
    num_layers: int,
    rotaries: Sequence[object],
    norm: Callable[[Tensor], Tensor],
    head: Any,
) -> WholePass | None:
    """The parts of a decoder in one call; None where some are not computed on the kernels of this process alone."""
    tables = [rotary for rotary in rotaries if isinstance(rotary, RotaryTable)]
    if type(layers) is not NativeLayers or type(head) is not PackedHead or len(tables) < len(rotaries):
        return None
    if not isinstance(embedding, (PackedEmbedding, Embedding)) or not isinstance(norm, NativeRMSNorm):
        return None
    return WholePass(embedding=embedding, layers=layers, num_layers=num_layers, rotaries=tables, norm=norm, head=head)
