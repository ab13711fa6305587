"""Forward passes of a predictor over the texts of several sequences and what is being drafted after them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.drafters.base import DraftRequest
from forerun.drafters.predictor import Prediction, Predictor
from forerun.kv.cache import KVCache
from forerun.ops.attention.base import Attention

MOST_ROWS = 512  # of text that a drafter has yet to read, in one pass

Places = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Line:
    """One sequence to draft for: the predictor has entries for its first `start` places, and wanted is a draft of at most `max_tokens` nodes, `max_depth` deep.

    `table` are the blocks of all places that reading and drafting write to: those of the committed text,
    then scratch blocks.
    """

    request: DraftRequest
    start: int
    table: npt.NDArray[np.int32]
    max_tokens: int
    max_depth: int

    @property
    def is_wanted(self) -> bool:
        """Whether a draft of any length is."""
        return self.max_tokens > 0 and self.max_depth > 0

    @property
    def end(self) -> int:
        """The first place of the draft."""
        return len(self.request.sequence)


@dataclass(slots=True, kw_only=True)
class Rows:
    """What one line computes in a pass: tokens at the places from `start` on, predictions wanted at the last `num_wanted`.

    `positions` and `mask` are those of a tree's nodes (`SequenceRows.tree_mask`); None: one after the other.
    """

    line: Line
    token_ids: list[int]
    start: int
    num_wanted: int
    states: Tensor | None = None
    positions: list[int] | None = None
    mask: Tensor | None = None


def scratch_blocks_per_line(num_places: int, *, block_size: int) -> int:
    """Blocks that hold what a draft of so many places writes beyond the blocks of the committed text."""
    return -(-num_places // block_size) + 1


class Passes:
    """A predictor over a paged cache, whose scratch blocks follow the `num_blocks` of the sequences'."""

    def __init__(
        self,
        predictor: Predictor,
        attention: Attention,
        cache: KVCache,
        *,
        num_blocks: int,
        scratch_per_line: int,
    ) -> None:
        self.predictor = predictor
        self._attention = attention
        self._cache = cache
        self._block_size = cache.block_size
        self._num_blocks = num_blocks
        self._scratch_per_line = scratch_per_line

    def line(self, number: int, request: DraftRequest, *, start: int, longest: int) -> Line:
        """Line `number` of a step, of a text that drafting may make `longest` tokens long; its scratch blocks are its own."""
        first_scratch = self._num_blocks + number * self._scratch_per_line
        scratch = np.arange(first_scratch, first_scratch + self._scratch_per_line, dtype=np.int32)
        num_used = -(-request.num_computed // self._block_size)
        return Line(
            request=request,
            start=max(start, self.predictor.num_hidden),
            table=np.concatenate([request.block_ids[:num_used], scratch]),
            max_tokens=request.max_tokens,
            max_depth=min(request.max_depth, longest - len(request.sequence)),
        )

    def read(self, line: Line, features: Mapping[str, Tensor]) -> Rows:
        """The rows of what a line's predictor has not read yet.

        Of a long text all but the last part is computed at once, so that no pass grows with the prompt.
        """
        while line.end - line.start > MOST_ROWS:
            self.forward([self._text(line, line.start + MOST_ROWS, features, num_wanted=0)])
            line.start += MOST_ROWS
        return self._text(line, line.end, features, num_wanted=1)

    def _text(self, line: Line, end: int, features: Mapping[str, Tensor], *, num_wanted: int) -> Rows:
        """Committed tokens from the line's start to `end`."""
        needs = self.predictor.needs
        slots_before = self._slots(line, np.arange(line.start - 1, end - 1)) if needs else np.empty(0, np.int64)
        return Rows(
            line=line,
            token_ids=line.request.sequence.tokens_between(line.start, end),
            start=line.start,
            num_wanted=num_wanted,
            states=self.predictor.read_states(features, self._tensor(slots_before)),
        )

    def forward(self, listed: Listing[Rows]) -> Prediction:
        """Compute all rows; predictions at the wanted rows of each, one line after the other."""
        places = [np.arange(rows.start, rows.start + len(rows.token_ids)) for rows in listed]
        positions = [
            own if rows.positions is None else rows.positions for own, rows in zip(places, listed, strict=True)
        ]
        counts = [len(own) for own in places]
        wanted = [
            np.arange(end - rows.num_wanted, end) for end, rows in zip(np.cumsum(counts).tolist(), listed, strict=True)
        ]
        batch = ForwardBatch(
            token_ids=self._tensor([token for rows in listed for token in rows.token_ids]),
            positions=self._tensor(np.concatenate(positions)),
            slot_mapping=self._tensor(
                np.concatenate([self._slots(rows.line, own) for rows, own in zip(listed, places, strict=True)])
            ),
            sequences=[
                SequenceRows(
                    num_context=rows.start,
                    num_rows=count,
                    block_ids=rows.line.table,
                    tree_mask=rows.mask,
                    num_hidden=self.predictor.num_hidden,
                )
                for rows, count in zip(listed, counts, strict=True)
            ],
            block_size=self._block_size,
            logits_rows=self._tensor(np.concatenate(wanted)),
        )
        given = [rows.states for rows in listed if rows.states is not None]
        states = None if not given else given[0] if len(given) == 1 else torch.cat(given)
        return self.predictor.predict(batch, states, self._attention.begin(batch, self._cache))

    def _slots(self, line: Line, places: Places) -> Places:
        slots: Places = line.table[places // self._block_size].astype(np.int64) * self._block_size
        return slots + places % self._block_size

    def _tensor(self, values: Places | list[int]) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self.predictor.device)
