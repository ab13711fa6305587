"""Drawing from many rows of logits at once: what is asked for, and the sampler that does it row by row in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from forerun.core.batch import Candidates
from forerun.errors import ForerunError
from forerun.ops.sampling import SamplingRules, target_tokens


class Draw(NamedTuple):
    """One row to draw from: by whose rules, after which text, and with which noise.

    `row` is a row of the step's logits; `position` the index in the sequence of the token to draw; `path` the drafted
    tokens after `output_ids`.
    """

    row: int
    rules: SamplingRules
    output_ids: list[int]
    path: Sequence[int]
    seed: int
    position: int


Drawn = list[int] | ForerunError
"""The tokens that were drawn, or why there are none: an error belongs to its own row."""


class RowSampler(Protocol):
    """Draws the target's own tokens; every implementation draws the same ones."""

    def draw(
        self, logits: Tensor, draws: Sequence[Draw], *, count: int = 1, candidates: Candidates | None = None
    ) -> list[Drawn]:
        """Return, for each of `draws`, the first `count` tokens of the race; fewer where fewer are possible.

        Args:
            logits: [num_rows, vocab_size] fp32, raw; not changed.
            draws: rows of `logits`, in any order.
            count: tokens of each row; a greedy request has one.
            candidates: those of all rows, where they are known; they save a look at every logit.
        """
        ...


class NumpySampler:
    """Row by row; the twin of `native.sampling.NativeSampler`, and the one that runs users' logits processors."""

    def draw(
        self,
        logits: Tensor,
        draws: Sequence[Draw],
        *,
        count: int = 1,
        candidates: Candidates | None = None,  # noqa: ARG002 - it looks at every logit
    ) -> list[Drawn]:
        """See `RowSampler`."""
        return [_draw(logits, one, count) for one in draws]


def _draw(logits: Tensor, one: Draw, count: int) -> Drawn:
    try:
        return target_tokens(
            *(one.rules, logits[one.row], one.output_ids, one.path),
            seed=one.seed,
            position=one.position,
            count=count,
        )
    except ForerunError as error:
        return error
