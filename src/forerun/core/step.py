"""One step between engine and executor: the plan that goes in, the result that comes out.

Both are plain records of integers and tuples, so that they can be sent to another process, kept in a
file, or compared in a test. Neither imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import StepTimes
from forerun.errors import ErrorKind

UNKNOWN_TOKEN = -1
"""A row's token that only the executor knows yet: its step's result has not been applied."""


def unknown_draft(num_tokens: int) -> Draft:
    """A draft of so many tokens that only the executor knows yet."""
    return Draft((UNKNOWN_TOKEN,) * num_tokens) if num_tokens else NO_DRAFT


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """What an executor must know of a sequence to compute it.

    `seed` keys the noise of every sampled token. `stop_token_ids` and `max_length` (tokens, prompt
    included) end the text; an executor that knows them drafts nothing after the end.
    `bad_words_ids` are the token ids of each bad word, `prediction_ids` those of the text that the
    client expects, `output_ids` tokens that another engine has written.
    """

    seq_id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int
    cache_salt: str | None = None
    max_length: int
    output_ids: tuple[int, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    prediction_ids: tuple[int, ...] = ()

    def ends(self, num_output_tokens: int, token_id: int) -> bool:
        """Whether `token_id`, the last of `num_output_tokens`, ends the text by its id or by the length."""
        if len(self.prompt_ids) + num_output_tokens >= self.max_length:
            return True
        return token_id in self.stop_token_ids and num_output_tokens >= self.sampling.min_tokens

    def may_end(self, num_output_tokens: int, token_ids: Sequence[int]) -> bool:
        """Whether the text may end within `token_ids`, which follow `num_output_tokens`: a quick look, `ends` knows."""
        num_tokens = len(self.prompt_ids) + num_output_tokens + len(token_ids)
        return num_tokens >= self.max_length or not self.stop_token_ids.isdisjoint(token_ids)


NO_BLOCKS: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
NO_BLOCKS.flags.writeable = False


@dataclass(slots=True, kw_only=True, eq=False)
class PlannedSequence:
    """One sequence's rows in a step: `num_tail` committed tokens from place `start` on, then a draft.

    Only where the rows reach the last committed token is there something to judge (`reaches_end`), and
    only then may `num_draft` be above 0. `blocks` hold every place up to `end`. After the step the
    executor drafts at most `draft_limit` nodes for the next one, and need not draft what stands with less
    chance than `min_survival`. Where that is 0, it still drafts up to `forced_limit` tokens that the text's
    grammar forces, and asks no drafter.

    Where `is_pending` the result of the sequence's step before has not been applied: `start` is then the
    least it may be, `num_draft` the most, and the executor, which has the result, knows the rest.
    """

    seq_id: int
    start: int
    num_tail: int
    reaches_end: bool
    is_pending: bool = False
    num_draft: int = 0
    num_prompt_logits: int = 0  # leading rows whose logits give the logprobs of prompt tokens
    draft_limit: int = 0
    forced_limit: int = 0
    min_survival: float = 0.0
    end: int = 0  # places before it are reserved
    blocks: npt.NDArray[np.int32] = field(default_factory=lambda: NO_BLOCKS)


@dataclass(slots=True)
class Rows:
    """The rows of a step, all sequences packed one after the other.

    T = rows, R = rows whose logits are wanted, S = sequences.
    """

    token_ids: list[int]  # [T]; UNKNOWN_TOKEN where only the executor knows it
    positions: list[int]  # [T]; a draft node's is its depth after the tail
    slots: list[int]  # [T] block * block size + offset: where the row's KV goes
    logits_rows: list[int]  # [R], ascending
    first_rows: list[int]  # [S] first row of each sequence
    first_logits: list[int]  # [S] index in `logits_rows` of the first row to judge, or -1
    first_prompt_logits: list[int]  # [S] index in `logits_rows` of its prompt's first


def lay_out(
    sequences: Sequence[PlannedSequence],
    tails: Sequence[Sequence[int]],
    drafts: Sequence[Draft],
    *,
    block_size: int,
) -> Rows:
    """Lay out the rows of a step.

    Args:
        sequences: where each sequence's rows begin, and its blocks.
        tails: the committed tokens of each, `num_tail` of them.
        drafts: the draft of each, `num_draft` nodes; an unknown one is a chain of UNKNOWN_TOKEN.
        block_size: places in a block.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logits_rows: list[int] = []
    first_rows: list[int] = []
    first_logits: list[int] = []
    first_prompt_logits: list[int] = []
    for sequence, tail, draft in zip(sequences, tails, drafts, strict=True):
        first, start = len(token_ids), sequence.start
        first_rows.append(first)
        first_prompt_logits.append(len(logits_rows))
        token_ids += tail
        if draft.token_ids:
            token_ids += draft.token_ids
        num_rows = len(token_ids) - first
        if draft.parents is None:
            positions += range(start, start + num_rows)
        else:
            end = start + len(tail)
            positions += range(start, end)
            positions += (end - 1 + depth for depth in draft.depths())
        slots += _slots(sequence.blocks, start, num_rows, block_size)
        if sequence.num_prompt_logits:
            logits_rows += range(first, first + sequence.num_prompt_logits)
        if sequence.reaches_end and num_rows:
            first_logits.append(len(logits_rows))
            logits_rows += range(first + len(tail) - 1, len(token_ids))
        else:
            first_logits.append(-1)
    return Rows(token_ids, positions, slots, logits_rows, first_rows, first_logits, first_prompt_logits)


def _slots(blocks: npt.NDArray[np.int32], start: int, num_rows: int, block_size: int) -> Sequence[int]:
    """Slots of the places [start, start + num_rows)."""
    index, offset = divmod(start, block_size)
    if offset + num_rows <= block_size:  # within a block, as most steps are
        first = blocks.item(index) * block_size + offset if num_rows else 0
        return range(first, first + num_rows)
    slots: list[int] = []
    end = start + num_rows
    while start < end:
        last = min(end, (index + 1) * block_size)
        first = blocks.item(index) * block_size + start % block_size
        slots += range(first, first + last - start)
        start = last
        index += 1
    return slots


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What one step computes: decided by the engine from integers alone.

    `new` are the sequences that the executor meets for the first time. Where any of `sequences` is
    pending the plan is too, and the executor lays the rows out again from what it knows.
    """

    sequences: list[PlannedSequence]
    rows: Rows
    block_size: int
    number: int = 1  # of the steps that were executed and whose results came, this one included
    time: float = 0.0  # when it was made, by the engine's clock
    new: list[SequenceSpec] = field(default_factory=list)
    is_pending: bool = False


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities (nats) of R rows: the chosen token's value and rank, and the likeliest tokens."""

    chosen: list[float]
    ranks: list[int]  # 1 = no token is more likely
    top_ids: list[list[int]]
    top_values: list[list[float]]


@dataclass(slots=True)
class SequenceResult:
    """What a step gave one sequence.

    `accepted` are the nodes of the draft that stand, from the root down, and `token_ids` their tokens and
    the target's own after them; both are empty where nothing was judged. `draft` is what the next step may
    verify. `error`, if set, says why the sequence could not be judged, and `error_kind` whose mistake that is.
    """

    accepted: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    draft: Draft = NO_DRAFT
    error: str | None = None
    error_kind: ErrorKind | None = None
    logprobs: RowLogprobs | None = None  # of `token_ids`, where they are asked for
    prompt_logprobs: RowLogprobs | None = None  # of the prompt tokens that this step's rows predict

    @property
    def is_decided(self) -> bool:
        """Whether the step gave the sequence a token, or its end; else, where it was to be judged, the next step asks again."""
        return bool(self.token_ids) or self.error is not None


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What a step gave, sequence by sequence in the plan's order, and what it took."""

    sequences: list[SequenceResult]
    times: StepTimes
    num_failed_drafts: int = 0  # failures of the drafter since the executor was made


class PendingResult(Protocol):
    """What a step is going to give; a device may still be computing it."""

    def result(self) -> StepResult:
        """Wait for what the step gave, which is the same however often it is asked for.

        Where it raises, what the step and those after it computed is void, and the same rows may be planned again; an
        interrupt changes nothing, and it may be asked for again.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReadyResult:
    """The result of a step that is over."""

    value: StepResult

    def result(self) -> StepResult:
        """See `PendingResult`."""
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSequence:
    """A sequence that has ended: so many of its output tokens stand.

    With `hidden_states_path` its hidden states are to be saved there before its `blocks` are anyone
    else's.
    """

    seq_id: int
    num_output_tokens: int
    hidden_states_path: str | None = None
    blocks: npt.NDArray[np.int32] | None = None


class LateDraft(NamedTuple):
    """A draft that the engine got to know after its step had been planned, whatever part of it was verified."""

    draft: Draft
    limit: int  # the most tokens that were asked for
    token_ids: Sequence[int]  # what the text has in its place, as far as the step wrote it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What a step drafted, what stood, and what it cost: what adaptive speculation learns from.

    `verified` has of each sequence that was judged its draft, perhaps an empty one, and the nodes that stood. Of a step
    planned before the last one's result was known, rows and context are the most and the least they can have been; its
    drafts are of unknown tokens there, and `late` says what they turned out to be.
    """

    num_rows: int
    num_context_tokens: int  # in the KV cache of the step's sequences, before it
    num_asked: int  # sequences that a draft for the next step was asked for
    verified: list[tuple[Draft, tuple[int, ...]]]
    times: StepTimes
    late: list[LateDraft] = field(default_factory=list)
