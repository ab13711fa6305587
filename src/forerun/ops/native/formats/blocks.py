"""Weights in GGUF's block formats as the kernels store them: the same codes and scales, in tiles of 32 outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.ops.block_formats import BLOCK_FORMATS, HALVES_OF_E2M1, NORMAL_FLOAT_4, BlockGroups
from forerun.ops.block_weight import BlockWeight, GatedWeight
from forerun.ops.native.formats.base import PackedWeight, StoredFormat, padded_outputs
from forerun.ops.native.library import Kernels
from forerun.ops.native.memory import Arena
from forerun.ops.native.structs import TILE

WHOLE = 256
"""Inputs whose groups' scales are multiples of one scale, in the formats that have such."""

SCALE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
UNIT = 32  # inputs
PACKED_AT_ONCE = 1 << 25
"""Bytes; of a mapped file so many, and no whole matrix, are in memory beside what they become."""

QUADS = 4  # of a unit


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTiles(StoredFormat):
    """[tiles, bytes of a tile] uint8: all scales and offsets of the tile, then its codes; see csrc/blocks.h.

    name: of the row of `BLOCK_FORMATS`. planes: bits of a code in each of its planes. scales: "fp16", "bf16" or "fp32" of each
    group; "steps", of which a group has a whole number of its 256 inputs' fp16; "shared steps" of four bits.
    """

    activations: torch.dtype = torch.bfloat16
    planes: tuple[int, ...]
    scales: str
    has_offsets: bool = False
    values: tuple[int, ...] | None = None  # that codes stand for; None: they count from `first` up
    first: int = 0

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return BLOCK_FORMATS[self.name].group

    def pack(self, kernels: Kernels, weight: BlockWeight, bias: Tensor | None, arena: Arena) -> PackedWeight:
        """Store a weight and its bias [outputs], in memory of the arena."""
        return self._packed(kernels, [weight], weight.shape[0], bias, arena)

    def pack_gated(self, kernels: Kernels, weight: GatedWeight, bias: Tensor | None, arena: Arena) -> PackedWeight:
        """Store gates and ups as one weight, whose tiles have as many of either, and their bias in that order."""
        return self._packed(kernels, [weight.gates, weight.ups], weight.shape[0], bias, arena)

    def _packed(
        self, kernels: Kernels, parts: Sequence[BlockWeight], outputs: int, bias: Tensor | None, arena: Arena
    ) -> PackedWeight:
        """One weight, or two of as many outputs that lie half and half in each tile."""
        inputs, of_each = parts[0].shape[1], TILE // len(parts)
        sizes = [count * TILE * size for count, size in self._sections(inputs)]
        data = arena.empty((-(-outputs // TILE), sum(sizes)), torch.uint8)
        blocks = [part.data.contiguous() for part in parts]
        step = max(1, PACKED_AT_ONCE // data.shape[1])  # tiles
        for first in range(0, len(data), step):
            tiles = data[first : first + step]
            some = [of_part[first * of_each : (first + step) * of_each] for of_part in blocks]
            ups = some[1].data_ptr() if len(some) > 1 else None
            kernels.pack_blocks(
                self.kernel_id, some[0].data_ptr(), ups, len(some[0]), inputs, data.shape[1], tiles.data_ptr()
            )
            for part, packed in zip(parts, some, strict=True):
                if part.forget is not None:
                    begin = first * of_each * packed.shape[1]
                    part.forget(begin, begin + packed.nbytes)
        return PackedWeight(
            format=self,
            data=data,
            outputs=outputs,
            inputs=inputs,
            bias=None if bias is None else padded_outputs(bias, arena),
        )

    def unpack(self, packed: PackedWeight) -> Tensor:
        """See `StoredFormat`; the values are those of `BlockWeight.dequantize`."""
        groups = self._groups(list(self._cut(packed)), packed.inputs)
        return groups.values()[: packed.outputs]

    def select(self, kernels: Kernels, packed: PackedWeight, outputs: Tensor) -> PackedWeight:  # noqa: ARG002
        """See `StoredFormat`: whatever a tile holds lies side by side for its outputs."""
        padded = torch.zeros(-(-len(outputs) // TILE) * TILE, dtype=torch.int64)
        padded[: len(outputs)] = outputs
        chosen = [
            torch.unflatten(section[padded // TILE, :, padded % TILE], 0, (-1, TILE)).transpose(1, 2).flatten(1)
            for section in self._cut(packed)
        ]
        return PackedWeight(
            format=self,
            data=torch.cat(chosen, dim=1),
            outputs=len(outputs),
            inputs=packed.inputs,
            bias=None if packed.bias is None else packed.bias[padded].contiguous(),
            row_bits=packed.row_bits,
        )

    def _sections(self, inputs: int) -> list[tuple[int, int]]:
        """What a tile holds one after the other: how many items of each output, and the bytes of one."""
        sets = 2 if self.has_offsets else 1
        codes = (inputs // 2, 2) if self.planes == (8,) else (inputs // UNIT * sum(self.planes), 4)
        groups = inputs // self.group
        if self.scales in SCALE_BYTES:
            return [(groups * sets, SCALE_BYTES[self.scales]), codes]
        return [(inputs // WHOLE * sets, 2), (groups * (1 if self.scales == "shared steps" else sets), 1), codes]

    def _cut(self, packed: PackedWeight) -> Iterator[Tensor]:
        """The sections of all tiles: [tiles, items, 32, bytes of one] uint8 each."""
        begin = 0
        for count, size in self._sections(packed.inputs):
            end = begin + count * TILE * size
            yield torch.unflatten(packed.data[:, begin:end], 1, (count, TILE, size))
            begin = end

    def _groups(self, sections: list[Tensor], inputs: int) -> BlockGroups:
        """The twin in torch of `read_header` and `CodeReader` of csrc."""
        *header, packed_codes = sections
        scale, offset = self._scales(header)
        return BlockGroups(self._codes(packed_codes, inputs), scale, offset)

    def _scales(self, header: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        sets = 2 if self.has_offsets else 1

        def by_output(items: Tensor) -> Tensor:  # [tiles, items, 32] -> [sets, outputs, items / sets]
            return torch.unflatten(items, 1, (-1, sets)).permute(2, 0, 3, 1).flatten(1, 2)

        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(self.scales, torch.float16)
        scales = by_output(header[0].contiguous().view(dtype)[..., 0].float())
        if self.scales not in SCALE_BYTES:
            steps = header[1][..., 0]
            if self.scales == "shared steps":
                steps = torch.stack([steps & 15, steps >> 4], dim=2).flatten(1, 2)
            groups = by_output(steps.view(torch.int8).float())
            if self.has_offsets:
                groups = torch.stack([groups[0], -groups[1]])
            scales = scales.repeat_interleave(WHOLE // self.group, dim=2) * groups
        return scales[0], scales[1] if self.has_offsets else None

    def _codes(self, packed: Tensor, inputs: int) -> Tensor:
        """[tiles, items, 32, bytes] -> int8 [outputs, inputs], what the codes stand for."""
        if self.planes == (8,):
            return packed.transpose(1, 2).flatten(2).flatten(0, 1).view(torch.int8)
        words = packed.contiguous().view(torch.int16).int() & 0xFFFF  # [tiles, items, 32, 2]
        words = torch.unflatten(words, 1, (inputs // UNIT, sum(self.planes)))
        codes = torch.zeros((), dtype=torch.int32)
        place = 0
        for plane, width in zip(torch.split(words, list(self.planes), dim=2), self.planes, strict=True):
            shifts = torch.arange(QUADS // width)[:, None] * width + torch.arange(4) * 4  # [quads of a word, steps]
            bits = plane[:, :, :, None, None] >> shifts[..., None, None] & (1 << width) - 1
            codes = codes | bits.flatten(2, 4) << place  # [tiles, units, steps, 32, 2]
            place += width
        codes = codes.permute(0, 3, 1, 2, 4).reshape(-1, inputs)
        if self.values is not None:
            return torch.tensor(self.values, dtype=torch.int8)[codes]
        return (codes + self.first).to(torch.int8)


_ROWS = (
    BlockTiles(name="Q8_0", kernel_id=16, planes=(8,), scales="fp16"),
    BlockTiles(name="Q4_0", kernel_id=17, planes=(4,), scales="fp16", first=-8),
    BlockTiles(name="Q4_1", kernel_id=18, planes=(4,), scales="fp16", has_offsets=True),
    BlockTiles(name="Q5_0", kernel_id=19, planes=(4, 1), scales="fp16", first=-16),
    BlockTiles(name="Q5_1", kernel_id=20, planes=(4, 1), scales="fp16", has_offsets=True),
    BlockTiles(name="Q2_K", kernel_id=21, planes=(2,), scales="shared steps", has_offsets=True),
    BlockTiles(name="Q3_K", kernel_id=22, planes=(2, 1), scales="steps", first=-4),
    BlockTiles(name="Q4_K", kernel_id=23, planes=(4,), scales="steps", has_offsets=True),
    BlockTiles(name="Q5_K", kernel_id=24, planes=(4, 1), scales="steps", has_offsets=True),
    BlockTiles(name="Q6_K", kernel_id=25, planes=(4, 2), scales="steps", first=-32),
    BlockTiles(name="IQ4_NL", kernel_id=26, planes=(4,), scales="fp16", values=NORMAL_FLOAT_4),
    BlockTiles(name="IQ4_XS", kernel_id=27, planes=(4,), scales="steps", values=NORMAL_FLOAT_4),
    BlockTiles(name="MXFP4", kernel_id=28, planes=(4,), scales="bf16", values=HALVES_OF_E2M1),
    BlockTiles(name="GROUPS16", kernel_id=29, planes=(8,), scales="fp32", has_offsets=True),
)

BLOCK_TILES: dict[str, BlockTiles] = {row.name: row for row in _ROWS}
"""How each row of `BLOCK_FORMATS` is stored."""


WORD_LEVELS = ("avx512vnni", "avxvnni")
"""Levels that multiply whole numbers of 16 bits faster than numbers of bf16 or fp32."""


def row_bits_of(activation_dtype: str, level: str) -> int:
    """What the setting means on a level, for `rounding_rows`."""
    named = {"bfloat16": 0, "int16": 16, "int8": 8}
    return named.get(activation_dtype, 16 if level in WORD_LEVELS else 0)


def rounding_rows(weight: PackedWeight, bits: int) -> PackedWeight:
    """The same weight, whose rows are rounded to 8 or 16 bits where it is in blocks: `ops.block_rounding.round_rows`.

    Products are then of whole numbers, and take a half or a quarter of the time where arithmetic is what takes it; see
    csrc/rounded_blocks.h and csrc/word_blocks.h. A weight in another format is returned as it is; 0 bits round nothing.
    """
    if weight.parts:
        parts = tuple(rounding_rows(part, bits) for part in weight.parts)
        return replace(weight, parts=parts, row_bits=max(part.row_bits for part in parts))
    return replace(weight, row_bits=bits) if isinstance(weight.format, BlockTiles) else weight
