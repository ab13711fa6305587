"""A weight whose values stay as a file has them: blocks of codes that share scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.ops.block_formats import BLOCK_FORMATS, BlockFormat, BlockGroups

GATES_AT_ONCE = 16  # that lie beside their ups
READ_AT_ONCE = 1 << 18  # weights: what dequantizing takes beside its result stays in the processor's caches


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeight:
    """A weight [outputs, inputs] in blocks along its inputs.

    format: a name of `BLOCK_FORMATS`. data: uint8 [outputs, bytes of an output], the blocks as GGUF defines them, one
    after the other; it may be a view of a mapped file, and is never written to. forget: where they are all of a mapped
    tensor, gives back the memory of bytes [begin, end), which are read again where they are needed again.
    """

    format: str
    shape: tuple[int, int]
    data: Tensor
    forget: Callable[[int, int], None] | None = field(default=None, compare=False, repr=False)

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
        return self.dequantize_into(torch.empty(self.shape, dtype=torch.float32))

    def dequantize_into(self, values: Tensor) -> Tensor:
        """Write the values, rounded to its dtype, into `values` [outputs, inputs], a few outputs at a time; return it."""
        step = max(1, READ_AT_ONCE // max(1, self.shape[1]))
        for first in range(0, self.shape[0], step):
            values[first : first + step] = self[first : first + step].groups().values()
        return values

    def __getitem__(self, outputs: slice | Tensor) -> BlockWeight:
        """Some outputs: a slice is a view, a tensor of indices [n] is a copy in their order."""
        data = self.data[outputs]
        return BlockWeight(format=self.format, shape=(len(data), self.shape[1]), data=data)

    def as_groups16(self) -> BlockWeight:
        """The same values in the format that holds all others, at up to three times the size."""
        return in_groups16(self.groups())


def in_groups16(groups: BlockGroups) -> BlockWeight:
    """Whole outputs, whose groups are a multiple of 16 weights, in the format whose scales and offsets are fp32."""
    outputs, inputs = groups.codes.shape
    repeats = inputs // groups.scale.shape[1] // 16
    scale = groups.scale.repeat_interleave(repeats, dim=1)
    offset = torch.full_like(scale, -0.0) if groups.offset is None else groups.offset.repeat_interleave(repeats, dim=1)
    numbers = torch.stack([scale, offset], dim=2).view(torch.uint8)  # [outputs, groups, 8]
    codes = torch.unflatten(groups.codes.view(torch.uint8), 1, (-1, 16))
    return BlockWeight(format="GROUPS16", shape=(outputs, inputs), data=torch.cat([numbers, codes], dim=2).flatten(1))


@dataclass(frozen=True, slots=True)
class JoinedWeight:
    """Weights of the same inputs, the outputs of one after those of the other; as many formats as parts."""

    parts: tuple[BlockWeight | Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)"""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    def in_one_format(self) -> BlockWeight | Tensor:
        """The same as blocks of one format, or dense where a part is."""
        if any(isinstance(part, Tensor) for part in self.parts):
            return self.dequantize()
        joined = join_weights([part.as_groups16() for part in self.parts if isinstance(part, BlockWeight)])
        assert isinstance(joined, BlockWeight)
        return joined

    def dequantize(self) -> Tensor:
        """The values of all parts, in fp32."""
        return torch.cat([part.float() if isinstance(part, Tensor) else part.dequantize() for part in self.parts])


@dataclass(frozen=True, slots=True)
class GatedWeight:
    """Gates and ups of one format as one weight, whose outputs are `interleaved`."""

    gates: BlockWeight
    ups: BlockWeight

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs), with those that fill up the last gates and ups"""
        num_gates, inputs = self.gates.shape
        return 2 * GATES_AT_ONCE * -(-num_gates // GATES_AT_ONCE), inputs

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.gates.nbytes + self.ups.nbytes

    def dequantize(self) -> Tensor:
        """The values, in fp32."""
        return interleaved(self.gates.dequantize(), self.ups.dequantize())


def interleaved(gates: Tensor, ups: Tensor) -> Tensor:
    """16 gates, their 16 ups, the next 16 gates ...: twice [n, ...] -> [outputs, ...], zeros where gates do not fill the last 16."""
    missing = -len(gates) % GATES_AT_ONCE
    padded = (torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows for rows in (gates, ups))
    by_sixteen = [rows.reshape(-1, GATES_AT_ONCE, *rows.shape[1:]) for rows in padded]
    return torch.stack(by_sixteen, dim=1).flatten(0, 2)


AnyWeight = Tensor | BlockWeight | JoinedWeight | GatedWeight
"""A weight [outputs, inputs] as a model file has it, or as one product takes several of them."""


def join_weights(parts: Sequence[BlockWeight | Tensor]) -> AnyWeight:
    """The outputs of all parts as one weight: of one format or dtype if all have the same, else joined."""
    if len({part.format if isinstance(part, BlockWeight) else part.dtype for part in parts}) > 1:
        return JoinedWeight(tuple(parts))
    if isinstance(parts[0], Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    blocks = [part for part in parts if isinstance(part, BlockWeight)]
    data = blocks[0].data if len(blocks) == 1 else torch.cat([part.data for part in blocks])
    return BlockWeight(format=blocks[0].format, shape=(len(data), blocks[0].shape[1]), data=data)


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """x @ weight.T + bias on a weight in blocks: the naive twin of what the kernels compute once it is packed."""

    weight: BlockWeight | JoinedWeight | GatedWeight
    bias: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that a pass reads."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out] in x's dtype; sums are fp32."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.dequantize(), bias).to(x.dtype)
