"""A progress bar over the weights of a checkpoint while they are read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from tqdm import tqdm

from forerun.models.checkpoint import Checkpoint
from forerun.ops.block_weight import BlockWeight

SHOWN_AFTER_S = 1.0
"""What is loaded sooner needs no bar."""


class CountedCheckpoint:
    """A `Checkpoint` that advances a bar by the number of weights in each tensor that is loaded."""

    def __init__(self, checkpoint: Checkpoint, bar: tqdm) -> None:  # type: ignore[type-arg]
        self._checkpoint = checkpoint
        self._bar = bar
        self.facts = checkpoint.facts

    def names(self) -> frozenset[str]:
        """See `Checkpoint`."""
        return self._checkpoint.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint`."""
        return self._checkpoint.shape(name)

    def load(self, name: str) -> Tensor | BlockWeight:
        """See `Checkpoint`."""
        tensor = self._checkpoint.load(name)
        self._bar.update(math.prod(self.shape(name)))
        return tensor


@contextmanager
def shown_loading(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Show on standard error, for as long as the block runs, how many of a checkpoint's weights are loaded, and the time left."""
    total = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    with tqdm(
        desc="Loading weights", total=total, unit=" weights", unit_scale=True, leave=False, delay=SHOWN_AFTER_S
    ) as bar:
        yield CountedCheckpoint(checkpoint, bar)
