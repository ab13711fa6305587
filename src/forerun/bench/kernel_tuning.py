"""Chooses how a GPU's kernels cut each weight's product: candidates that leave a row's bits its own, timed on the GPU itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.models.config import DecoderConfig
from forerun.ops.cuda.tiles import Shape, Tiles, rule_of

ROWS = (1, 8, 16, 32, 64)
"""One choice serves all of these: a cut that hung on the number of rows would give a row other bits beside others."""

LEAST_GAIN = 0.02  # below that the rule stays
NUM_FINALISTS = 6
_OUTPUTS, _INPUTS, _SPLITS = (32, 64, 128), (64, 128, 256), (1, 2, 4, 8)
_MOST_ROWS = 32  # of a tile
_NUM_BUFFERS = 3  # steps of inputs that lie in shared memory at once
_ITEM_BYTES = 2


class Meter(Protocol):
    """Measures a GPU; a fake stands in for it in tests."""

    def microseconds(self, shape: Shape, tiles: Tiles, num_rows: int) -> float:
        """Time of one product of so many rows, its weight not in the cache."""
        ...

    def keeps_bits(self, shape: Shape, tiles: Tiles) -> bool:
        """Whether a row has the same bits alone and beside others."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedShape:
    """What was found for one weight.

    Attributes:
        shape: [outputs, inputs].
        tiles: the best, or the rule's where none is clearly better.
        gain: how much faster than the rule's, over all numbers of rows; 0 for the rule's.
        num_refused: candidates that gave a row other bits beside others.
    """

    shape: Shape
    tiles: Tiles
    gain: float
    num_refused: int


def weight_shapes(config: DecoderConfig) -> list[Shape]:
    """The weights whose products a decoder's pass computes, each once."""
    width, hidden = config.num_heads * config.head_dim, config.hidden_size
    shapes = [
        (width + 2 * config.num_kv_heads * config.head_dim, hidden),
        (hidden, width),
        (2 * config.intermediate_size, hidden),
        (hidden, config.intermediate_size),
        (config.vocab_size, hidden),
    ]
    return list(dict.fromkeys(shapes))


def candidates(shape: Shape, *, shared_bytes: int) -> list[Tiles]:
    """Cuts of a weight that fit into a multiprocessor's shared memory, with no part that has nothing to sum; the rule's first."""
    num_outputs, num_inputs = shape
    rule = rule_of(*shape)
    others = (Tiles(*numbers) for numbers in itertools.product(_OUTPUTS, _INPUTS, _SPLITS))
    return [
        rule,
        *(
            tiles
            for tiles in others
            if tiles != rule
            and tiles.outputs <= max(num_outputs, min(_OUTPUTS))
            and tiles.inputs * tiles.splits <= max(num_inputs, min(_INPUTS))
            and _NUM_BUFFERS * _ITEM_BYTES * tiles.inputs * (tiles.outputs + _MOST_ROWS) <= shared_bytes
        ),
    ]


def tune_shape(
    shape: Shape, meter: Meter, *, shared_bytes: int, rounds: int = 3, rows: Sequence[int] = ROWS
) -> TunedShape:
    """Find the fastest cut of one weight for all numbers of rows together.

    A look at the fewest and the most rows leaves a few; these are timed in turn, round after round, and the least time of each
    counts. The winner must keep a row's bits, or the next takes its place.
    """
    rule, *others = candidates(shape, shared_bytes=shared_bytes)
    look = _least_times([rule, *others], shape, meter, rows=(min(rows), max(rows)), rounds=1)
    finalists = sorted(others, key=lambda tiles: _ratio(look[tiles], look[rule]))[:NUM_FINALISTS]
    times = _least_times([rule, *finalists], shape, meter, rows=rows, rounds=rounds)
    num_refused = 0
    for tiles in sorted(finalists, key=lambda tiles: _ratio(times[tiles], times[rule])):
        gain = 1 / _ratio(times[tiles], times[rule]) - 1
        if gain < LEAST_GAIN:
            break
        if meter.keeps_bits(shape, tiles):
            return TunedShape(shape=shape, tiles=tiles, gain=gain, num_refused=num_refused)
        num_refused += 1
    return TunedShape(shape=shape, tiles=rule, gain=0.0, num_refused=num_refused)


def tune(
    shapes: Iterable[Shape],
    meter: Meter,
    *,
    shared_bytes: int,
    rounds: int = 3,
    report: Callable[[TunedShape], None] = lambda _found: None,
) -> dict[Shape, Tiles]:
    """The cuts of all weights for which something is clearly better than the rule."""
    chosen: dict[Shape, Tiles] = {}
    for shape in shapes:
        found = tune_shape(shape, meter, shared_bytes=shared_bytes, rounds=rounds)
        report(found)
        if found.gain:
            chosen[shape] = found.tiles
    return chosen


def _least_times(
    tiles: Sequence[Tiles], shape: Shape, meter: Meter, *, rows: Sequence[int], rounds: int
) -> dict[Tiles, list[float]]:
    """Of each cut the least time for each number of rows; rounds are interleaved, so that a slow moment meets all alike."""
    times = {one: [math.inf] * len(rows) for one in tiles}
    for _ in range(rounds):
        for place, num_rows in enumerate(rows):
            for one in tiles:
                times[one][place] = min(times[one][place], meter.microseconds(shape, one, num_rows))
    return times


def _ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The geometric mean of times against others."""
    return math.exp(sum(math.log(a / b) for a, b in zip(times, base, strict=True)) / len(base))
