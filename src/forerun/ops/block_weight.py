"""A weight whose values stay as a file has them: blocks of codes that share scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.ops.block_formats import BLOCK_FORMATS, BlockFormat, BlockGroups

READ_AT_ONCE = 1 << 22  # weights: what dequantizing takes beside its result stays small


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeight:
    """A weight [outputs, inputs] in blocks along its inputs.

    format: a name of `BLOCK_FORMATS`. data: uint8 [outputs, bytes of an output], the blocks as GGUF defines them, one
    after the other; it may be a view of a mapped file, and is never written to.
    """

    format: str
    shape: tuple[int, int]
    data: Tensor

    def __post_init__(self) -> None:
        """Check that the data are blocks of such a weight.

        Raises:
            ValueError: the format is unknown, or the sizes do not fit each other.
        """
        if self.format not in BLOCK_FORMATS:
            raise ValueError(f"block format: got {self.format!r}; may be {', '.join(BLOCK_FORMATS)}")
        outputs, inputs = self.shape
        row = self.layout
        expected = (outputs, inputs // row.weights * row.bytes)
        if inputs % row.weights or tuple(self.data.shape) != expected or self.data.dtype != torch.uint8:
            raise ValueError(
                f"{self.format}: got {self.data.dtype} {list(self.data.shape)} for a weight {list(self.shape)}; "
                f"must be bytes [outputs, inputs / {row.weights} * {row.bytes}]"
            )

    @property
    def layout(self) -> BlockFormat:
        """Where a block's bytes hold what."""
        return BLOCK_FORMATS[self.format]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.data.nbytes

    def groups(self) -> BlockGroups:
        """Codes [outputs, inputs], scales and offsets [outputs, groups] of the whole weight."""
        outputs = self.shape[0]
        found = self.layout.split(self.data.reshape(-1, self.layout.bytes))
        offset = None if found.offset is None else found.offset.reshape(outputs, -1)
        return BlockGroups(found.codes.reshape(self.shape), found.scale.reshape(outputs, -1), offset)

    def dequantize(self) -> Tensor:
        """The values that the format defines, in fp32: the naive twin of every kernel that reads blocks."""
        values = torch.empty(self.shape, dtype=torch.float32)
        step = max(1, READ_AT_ONCE // max(1, self.shape[1]))
        for first in range(0, self.shape[0], step):
            values[first : first + step] = self[first : first + step].groups().values()
        return values

    def __getitem__(self, outputs: slice | Tensor) -> BlockWeight:
        """Some outputs: a slice is a view, a tensor of indices [n] is a copy in their order."""
        data = self.data[outputs]
        return BlockWeight(format=self.format, shape=(len(data), self.shape[1]), data=data)

    @staticmethod
    def join(parts: Sequence[BlockWeight]) -> BlockWeight:
        """The outputs of all parts, one part after the other; they have one format and as many inputs.

        Raises:
            ValueError: they differ.
        """
        first = parts[0]
        if any((part.format, part.shape[1]) != (first.format, first.shape[1]) for part in parts):
            raise ValueError("only weights of one block format and as many inputs can be joined")
        data = torch.cat([part.data for part in parts])
        return BlockWeight(format=first.format, shape=(len(data), first.shape[1]), data=data)
