"""What the first layer of a pass reads, as the kernels look it up: embeddings of tokens and rotations by position."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ctypes import Array, pointer
from typing import NamedTuple

from forerun.ops.layers import Embedding
from forerun.ops.native.layers import PackedEmbedding
from forerun.ops.native.structs import STORAGE, RotationTableStruct, TokenTableStruct
from forerun.ops.rotary import RotaryTable, Rotation


def token_table(embedding: PackedEmbedding | Embedding) -> TokenTableStruct:
    """Where a token's embedding lies, as long as `embedding` lives."""
    if isinstance(embedding, PackedEmbedding):
        weight = embedding.head.weight
        return TokenTableStruct(packed=pointer(weight.struct), num_tokens=weight.outputs, scale=embedding.scale)
    table = embedding.table
    return TokenTableStruct(
        rows=table.data_ptr(),
        num_tokens=len(table),
        scale=table.new_tensor(embedding.scale).item(),  # rounded as the twin rounds it
        storage=STORAGE[table.dtype],
    )


class TablesInMemory(NamedTuple):
    """Rotations of the positions [0, num_positions): `structs` for the kernels, good as long as this lives."""

    structs: Array[RotationTableStruct]
    num_tables: int
    num_positions: int
    rotations: Sequence[Rotation]  # whose addresses are in `structs`


class RotationTables:
    """The rotations of all positions: of none, for layers that know no positions, then of each of `rotaries`.

    Engines in several threads may share one: what it gave is never changed, only replaced by longer tables.
    """

    def __init__(self, rotaries: Sequence[RotaryTable]) -> None:
        self._rotaries = rotaries
        self._tables = _tables([])._replace(num_positions=0)

    def of_first(self, num_positions: int) -> TablesInMemory:
        """Tables of so many positions, or of more."""
        tables = self._tables
        if tables.num_positions < num_positions:
            tables = self._tables = _tables([rotary.of_first(num_positions) for rotary in self._rotaries])
        return tables


def _tables(rotations: Sequence[Rotation]) -> TablesInMemory:
    structs = (RotationTableStruct * (1 + len(rotations)))(
        RotationTableStruct(),
        *(
            RotationTableStruct(
                cos=rotation.cos.data_ptr(),
                sin=rotation.sin.data_ptr(),
                half=rotation.cos.shape[-1],
                num_positions=len(rotation.cos),
            )
            for rotation in rotations
        ),
    )
    num_positions = min((len(rotation.cos) for rotation in rotations), default=sys.maxsize)
    return TablesInMemory(structs, len(structs), num_positions, rotations)
