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
        num_unread = line.end - line.start - 1
        self.read_until(line, line.start + num_unread // MOST_ROWS * MOST_ROWS, features)
        return self._text(line, line.end, features, num_wanted=1)

    def read_until(self, line: Line, end: int, features: Mapping[str, Tensor]) -> None:
        """Compute the entries of committed tokens before `end`, in passes of at most `MOST_ROWS` rows."""
        while line.start < end:
            part = min(line.start + MOST_ROWS, end)
            self.forward([self._text(line, part, features, num_wanted=0)])
            line.start = part

    def _text(self, line: Line, end: int, features: Mapping[str, Tensor], *, num_wanted: int) -> Rows:
        """Committed tokens from the line's start to `end`."""
        needs = self.predictor.needs
        slots_before = self._slots(line, range(line.start - 1, end - 1)) if needs else []
        return Rows(
            line=line,
            token_ids=line.request.sequence.tokens_between(line.start, end),
            start=line.start,
            num_wanted=num_wanted,
            states=self.predictor.read_states(features, self._tensor(slots_before)),
        )

    def forward(self, listed: Listing[Rows]) -> Prediction:
        """Compute all rows; predictions at the wanted rows of each, one line after the other."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        for rows in listed:
            places = range(rows.start, rows.start + len(rows.token_ids))
            token_ids += rows.token_ids
            positions += places if rows.positions is None else rows.positions
            slots += self._slots(rows.line, places)
            wanted += range(len(token_ids) - rows.num_wanted, len(token_ids))
        by_row = self._tensor([token_ids, positions, slots])  # one tensor: making each takes as long as making all
        batch = ForwardBatch(
            token_ids=by_row[0],
            positions=by_row[1],
            slot_mapping=by_row[2],
            sequences=[
                SequenceRows(
                    num_context=rows.start,
                    num_rows=len(rows.token_ids),
                    block_ids=rows.line.table,
                    tree_mask=rows.mask,
                    num_hidden=self.predictor.num_hidden,
                )
                for rows in listed
            ],
            block_size=self._block_size,
            logits_rows=self._tensor(wanted),
        )
        given = [rows.states for rows in listed if rows.states is not None]
        states = None if not given else given[0] if len(given) == 1 else torch.cat(given)
        return self.predictor.predict(batch, states, self._attention.begin(batch, self._cache))

    def _slots(self, line: Line, places: range) -> list[int]:
        size, first = self._block_size, places.start // self._block_size
        blocks: list[int] = line.table[first : -(-places.stop // size)].tolist()
        return [blocks[place // size - first] * size + place % size for place in places]

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.predictor.device)
