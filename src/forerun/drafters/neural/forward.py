"""Forward passes of a draft network over committed texts and over what is drafted after them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.core.batch import MOST_CANDIDATES, ForwardBatch, LayerKVSpec, SequenceRows
from forerun.drafters.base import DraftRequest
from forerun.kv.cache import KVCache
from forerun.models.base import CausalModel, DraftHead
from forerun.models.decoder import Decoder
from forerun.ops.attention import Attend, Attention
from forerun.ops.native.attention import NativeAttention
from forerun.ops.native.chains import ChainText, DraftedChain, NativeChains

MAX_TEXT_ROWS = 512
"""Rows of unread text that one sequence has in a pass, at most."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """At each of R rows the `logits` [R, V] fp32 of the next token, and the `states` [R, width] for the next pass, or None."""

    logits: Tensor
    states: Tensor | None = None


class Predictor(Protocol):
    """A draft network that predicts the token after each row and keeps KV.

    It has a KV entry for each place of a text but the first `num_hidden`. `needs` names the target's
    hidden states that it reads, as in `Drafter`.
    """

    needs: frozenset[str]
    kv_specs: list[LayerKVSpec]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    num_hidden: int
    target_ids: (
        Tensor | None
    )  # [V] int64 ascending, the target's token of each logit; None where the logits cover all of them in order
    chains: NativeChains | None  # drafts the same tokens greedily in one call; None where the kernels cannot
    reads_tensors_only: bool  # of a batch: its `sequences` may be unknown to the host

    def read_states(self, hidden_states: Mapping[str, Tensor], slots_before: Tensor) -> Tensor | None:
        """The states to read T committed tokens with, from the hidden states at the slots [T] of the tokens before them.

        None where the network reads tokens alone.
        """
        ...

    def predict(self, batch: ForwardBatch, states: Tensor | None, attend: Attend) -> Prediction:
        """Compute the rows of a pass ([T]; `states` [T, width]) and predict at `batch.logits_rows`."""
        ...


class ModelPredictor:
    """A whole model; it reads tokens alone."""

    needs: frozenset[str] = frozenset()
    num_hidden = 0
    target_ids: Tensor | None = None
    chains: NativeChains | None = None

    def __init__(self, model: CausalModel) -> None:
        self.kv_specs = model.kv_specs
        self.dtype = model.dtype
        self.device = model.device
        self.max_model_len = model.max_model_len
        self.reads_tensors_only = isinstance(model, Decoder)
        self._model = model

    def read_states(self, hidden_states: Mapping[str, Tensor], slots_before: Tensor) -> None:
        """Return None: a whole model reads tokens alone."""

    def predict(self, batch: ForwardBatch, states: Tensor | None, attend: Attend) -> Prediction:  # noqa: ARG002
        """See `Predictor`."""
        return Prediction(self._model.forward(batch, attend).logits)


class HeadPredictor:
    """A head that reads each token with a state of the token before it: the target's hidden state where that is known.

    So its entry at place j is made of h[j - 1] and x[j] and depends on no token after place j. (Others
    keep the entry at j - 1, where it also depends on the first token of the next block.) Place 0 has no
    entry.
    """

    num_hidden = 1
    reads_tensors_only = True

    def __init__(self, head: DraftHead) -> None:
        self.needs = frozenset(head.needs)
        self.kv_specs = head.kv_specs
        self.dtype = head.dtype
        self.device = head.device
        self.max_model_len = head.max_model_len
        self.target_ids = head.target_ids
        self.chains = head.chains
        self._head = head

    def read_states(self, hidden_states: Mapping[str, Tensor], slots_before: Tensor) -> Tensor:
        """See `Predictor`."""
        return self._head.fuse([hidden_states[name].index_select(0, slots_before) for name in self._head.needs])

    def predict(self, batch: ForwardBatch, states: Tensor | None, attend: Attend) -> Prediction:
        """See `Predictor`."""
        assert states is not None, "a head reads states"
        outputs = self._head.forward(batch.token_ids, states, batch.positions - 1, attend)
        outputs = outputs.index_select(0, batch.logits_rows)
        return Prediction(self._head.logits(outputs), self._head.states(outputs))


@dataclass(slots=True, kw_only=True)
class DraftSequence:
    """One sequence in a drafting step: the network has KV entries of its first `num_read` places.

    The draft may have `max_tokens` nodes, `max_depth` deep. `block_table` (int32) are the blocks of all places
    that reading and drafting write to: those of the committed text, then scratch blocks.
    """

    request: DraftRequest
    num_read: int
    block_table: array[int]
    max_tokens: int
    max_depth: int

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """The same blocks for a pass."""
        return np.frombuffer(self.block_table, dtype=np.int32)

    @property
    def wants_draft(self) -> bool:
        """Whether the sequence may get a draft in this step."""
        return self.max_tokens > 0 and self.max_depth > 0

    @property
    def draft_start(self) -> int:
        """The place of the first drafted token: the length of the committed text."""
        return len(self.request.sequence)

    def depth_of_chain(self, num_runners_up: int) -> int:
        """How deep a chain may be that has so many runners-up beside each of its tokens."""
        return min(-(-self.max_tokens // (1 + num_runners_up)), self.max_depth)


@dataclass(slots=True, kw_only=True)
class QueryRows:
    """The rows of one sequence in a pass: tokens at the places from `start` on; the last `num_predicted` rows are predicted from.

    `positions` and `tree_mask` (as in `SequenceRows`) are those of a tree's nodes; where they are None
    the tokens follow one another. `states` [rows, width] are read beside the tokens, or None.
    """

    sequence: DraftSequence
    token_ids: list[int]
    start: int
    num_predicted: int
    states: Tensor | None = None
    positions: list[int] | None = None
    tree_mask: Tensor | None = None


class ForwardPasses(Protocol):
    """The passes that a `Writer` asks for: `PagedPasses`, or those of a network without KV."""

    def draft_chains(
        self,
        sequences: Listing[DraftSequence],
        is_greedy: Listing[bool],
        hidden_states: Mapping[str, Tensor],
        *,
        num_runners_up: int,
    ) -> list[DraftedChain] | None:
        """Draft for all sequences in one call, as deep as each may; None where passes are computed one by one.

        A chain's tokens and their runners-up are the likeliest tokens for a sequence that `is_greedy`, and those of the
        target's races for others.
        """
        ...

    def read(self, sequence: DraftSequence, hidden_states: Mapping[str, Tensor]) -> QueryRows:
        """The rows of the committed tokens that the network has not read yet."""
        ...

    def forward(self, all_rows: Listing[QueryRows]) -> Prediction:
        """Compute the rows of several sequences in one pass; return the predictions in the order of the rows."""
        ...


def scratch_blocks_per_sequence(num_places: int, *, block_size: int) -> int:
    """The number of blocks for what a draft of `num_places` KV places writes beyond the blocks of the committed text."""
    return -(-num_places // block_size) + 1


class PagedPasses:
    """Passes of a predictor over a paged cache, whose scratch blocks follow the `num_blocks` blocks of the texts."""

    def __init__(
        self,
        predictor: Predictor,
        attention: Attention,
        cache: KVCache,
        *,
        num_blocks: int,
        scratch_per_sequence: int,
    ) -> None:
        self.predictor = predictor
        self._attention = attention
        self._cache = cache
        self._block_size = cache.block_size
        self._num_blocks = num_blocks
        self._scratch_per_sequence = scratch_per_sequence
        self._scratch_of: list[array[int]] = []  # by the request's number in its step
        self._chains = predictor.chains
        self._addresses = attention.addresses(cache) if isinstance(attention, NativeAttention) else None

    def sequence(
        self, number: int, request: DraftRequest, table: array[int], *, num_read: int, max_model_len: int
    ) -> DraftSequence:
        """The sequence of the step's request `number`, whose blocks are `table`, with scratch blocks of its own behind them.

        Its draft does not go beyond `max_model_len` tokens of text.
        """
        num_used = -(-request.num_computed // self._block_size)
        return DraftSequence(
            request=request,
            num_read=max(num_read, self.predictor.num_hidden),
            block_table=table[:num_used] + self._scratch(number),
            max_tokens=request.max_tokens,
            max_depth=min(request.max_depth, max_model_len - len(request.sequence)),
        )

    def read(self, sequence: DraftSequence, hidden_states: Mapping[str, Tensor]) -> QueryRows:
        """The rows of the committed tokens that the network has not read yet.

        Of a long text all but the last part is read at once, so that no pass grows with the prompt.
        """
        self._read_all_but_last(sequence, hidden_states)
        return self._text_rows(sequence, sequence.draft_start, hidden_states, num_predicted=1)

    def _scratch(self, number: int) -> array[int]:
        """The scratch blocks of the step's request `number`."""
        while len(self._scratch_of) <= number:
            first = self._num_blocks + len(self._scratch_of) * self._scratch_per_sequence
            self._scratch_of.append(array("i", range(first, first + self._scratch_per_sequence)))
        return self._scratch_of[number]

    def draft_chains(
        self,
        sequences: Listing[DraftSequence],
        is_greedy: Listing[bool],
        hidden_states: Mapping[str, Tensor],
        *,
        num_runners_up: int,
    ) -> list[DraftedChain] | None:
        """See `ForwardPasses`."""
        if self._chains is None or self._addresses is None or num_runners_up >= MOST_CANDIDATES:
            return None
        texts = []
        for sequence, greedy in zip(sequences, is_greedy, strict=True):
            self._read_all_but_last(sequence, hidden_states)
            stop = sequence.request.early_stop
            texts.append(
                ChainText(
                    sequence.block_table,
                    sequence.num_read,
                    sequence.request.sequence.tokens_from(sequence.num_read),
                    sequence.depth_of_chain(num_runners_up),
                    None if greedy else sequence.request.rules,
                    sequence.request.sequence.seed,
                    0.0 if stop is None else stop.least_chance,
                    None if stop is None else stop.chances,
                )
            )
        return self._chains.draft(
            texts, hidden_states, self._addresses, block_size=self._block_size, num_runners_up=num_runners_up
        )

    def _read_all_but_last(self, sequence: DraftSequence, hidden_states: Mapping[str, Tensor]) -> None:
        """Read of a long text all but the last part."""
        num_unread = sequence.draft_start - sequence.num_read - 1
        self.read_until(sequence, sequence.num_read + num_unread // MAX_TEXT_ROWS * MAX_TEXT_ROWS, hidden_states)

    def read_until(self, sequence: DraftSequence, end: int, hidden_states: Mapping[str, Tensor]) -> None:
        """Read the committed tokens before place `end`, in passes of at most `MAX_TEXT_ROWS` rows."""
        while sequence.num_read < end:
            part = min(sequence.num_read + MAX_TEXT_ROWS, end)
            self.forward([self._text_rows(sequence, part, hidden_states, num_predicted=0)])
            sequence.num_read = part

    def _text_rows(
        self, sequence: DraftSequence, end: int, hidden_states: Mapping[str, Tensor], *, num_predicted: int
    ) -> QueryRows:
        """The rows of the unread committed tokens before place `end`."""
        first = sequence.num_read
        slots_before = self._slots(sequence, range(first - 1, end - 1)) if self.predictor.needs else []
        return QueryRows(
            sequence=sequence,
            token_ids=sequence.request.sequence.tokens_between(first, end),
            start=first,
            num_predicted=num_predicted,
            states=self.predictor.read_states(hidden_states, self._tensor(slots_before)),
        )

    def forward(self, all_rows: Listing[QueryRows]) -> Prediction:
        """Compute the rows of several sequences in one pass; return the predictions in the order of the rows."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        predicted: list[int] = []
        for rows in all_rows:
            places = range(rows.start, rows.start + len(rows.token_ids))
            token_ids += rows.token_ids
            positions += places if rows.positions is None else rows.positions
            slots += self._slots(rows.sequence, places)
            predicted += range(len(token_ids) - rows.num_predicted, len(token_ids))
        by_row = self._tensor([token_ids, positions, slots])  # one tensor: making each takes as long as making all
        batch = ForwardBatch(
            token_ids=by_row[0],
            positions=by_row[1],
            slot_mapping=by_row[2],
            sequences=[
                SequenceRows(
                    num_context=rows.start,
                    num_rows=len(rows.token_ids),
                    block_ids=rows.sequence.block_ids,
                    tree_mask=rows.tree_mask,
                    num_hidden=self.predictor.num_hidden,
                )
                for rows in all_rows
            ],
            block_size=self._block_size,
            logits_rows=self._tensor(predicted),
        )
        given = [rows.states for rows in all_rows if rows.states is not None]
        states = None if not given else given[0] if len(given) == 1 else torch.cat(given)
        return self.predictor.predict(batch, states, self._attention.begin(batch, self._cache))

    def _slots(self, sequence: DraftSequence, places: range) -> list[int]:
        size, first = self._block_size, places.start // self._block_size
        blocks = sequence.block_table[first : -(-places.stop // size)]
        return [blocks[place // size - first] * size + place % size for place in places]

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.predictor.device)


def last_hidden_states(hidden_states: Tensor, requests: Listing[DraftRequest], *, block_size: int) -> Tensor:
    """The rows of `hidden_states` [num_slots, width] at each request's last computed token: [R, width]."""
    slots = []
    for request in requests:
        block, offset = divmod(request.num_computed - 1, block_size)
        slots.append(int(request.block_ids[block]) * block_size + offset)
    return hidden_states.index_select(0, torch.tensor(slots, device=hidden_states.device))
