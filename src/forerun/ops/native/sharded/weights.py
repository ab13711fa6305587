"""Parts of packed weights: some outputs of a weight, with all their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.ops.native.formats.base import PackedWeight
from forerun.ops.native.formats.joined import JOINED
from forerun.ops.native.library import Kernels
from forerun.ops.native.memory import Arena
from forerun.ops.native.structs import TILE


def take_outputs(kernels: Kernels, weight: PackedWeight, ranges: Sequence[range], arena: Arena) -> PackedWeight:
    """A copy of the outputs in `ranges`, one after the other, in memory of the arena; it gives the bits of the whole.

    Whole tiles are copied as they lie; other outputs are packed again.

    Raises:
        ModelError: a joined weight's parts would not be whole tiles.
    """
    if weight.parts:
        return _take_of_joined(kernels, weight, ranges, arena)
    ends = (*ranges[1:], None)
    if all(
        part.start % TILE == 0 and (part.stop % TILE == 0 or (following is None and part.stop == weight.outputs))
        for part, following in zip(ranges, ends, strict=True)
    ):
        return take_tiles(weight, [range(part.start // TILE, -(-part.stop // TILE)) for part in ranges], arena)
    outputs = torch.cat([torch.arange(part.start, part.stop) for part in ranges])
    return weight.format.select(kernels, weight, outputs)


def take_tiles(weight: PackedWeight, tiles: Sequence[range], arena: Arena) -> PackedWeight:
    """A copy of whole tiles of 32 outputs, in memory of the arena."""
    outputs = sum(min(part.stop * TILE, weight.outputs) - min(part.start * TILE, weight.outputs) for part in tiles)
    found = replace(
        weight,
        data=_taken(weight.data, tiles, arena),
        outputs=outputs,
        scale=_of_tiles(weight.scale, tiles, arena),
        bias=_of_tiles(weight.bias, tiles, arena),
        rare=None,
        first_rare=None,
    )
    if weight.rare is None or weight.first_rare is None:
        return found
    first = weight.first_rare
    rare = _taken(weight.rare, [range(int(first[part.start]), int(first[part.stop])) for part in tiles], arena)
    counts = torch.cat([first.diff()[part.start : part.stop] for part in tiles])
    return replace(found, rare=rare, first_rare=torch.cat([first.new_zeros(1), counts.cumsum(0)]))


def _take_of_joined(kernels: Kernels, weight: PackedWeight, ranges: Sequence[range], arena: Arena) -> PackedWeight:
    """Each range lies within one part, as a rank's queries, keys and values do."""
    taken: list[PackedWeight] = []
    begin = 0
    for part in weight.parts:
        own = [
            range(one.start - begin, one.stop - begin)
            for one in ranges
            if begin <= one.start and one.stop <= begin + part.outputs
        ]
        taken.append(take_outputs(kernels, part, own, arena))
        begin += part.outputs
    if any(part.outputs % TILE for part in taken[:-1]):
        raise ModelError(
            f"tensor_parallel_size: a rank's heads would have {taken[0].outputs} outputs of a weight in several block "
            f"formats; must be a multiple of {TILE}; leave it out"
        )
    return JOINED.join(taken)


def _of_tiles(values: Tensor | None, tiles: Sequence[range], arena: Arena) -> Tensor | None:
    """What there is one of for each output, padded."""
    if values is None:
        return None
    return _taken(values, [range(part.start * TILE, part.stop * TILE) for part in tiles], arena)


def _taken(tensor: Tensor, ranges: Sequence[range], arena: Arena) -> Tensor:
    """Copies of leading indices, one after the other."""
    taken = arena.empty((sum(map(len, ranges)), *tensor.shape[1:]), tensor.dtype)
    begin = 0
    for part in ranges:
        taken[begin : begin + len(part)] = tensor[part.start : part.stop]
        begin += len(part)
    return taken
