"""The executor whose texts, rules and drafts lie in tables on the device, where rows are laid out and tokens drawn and matched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, ForwardResult
from forerun.core.step import EndedSequence, SequenceResult, SequenceSpec
from forerun.errors import ConfigError, ForerunError
from forerun.executor.device_slots import DeviceSlots, check_device_rules
from forerun.executor.local import LocalExecutor, PreparedStep
from forerun.executor.row_masks import JudgedSequence, row_masks
from forerun.ops.cuda.table import DevicePlan, StepRows, Verdicts
from forerun.ops.grammar import GrammarNotReadyError
from forerun.ops.sampling import check_largest
from forerun.verify.base import Verdict


class DeviceFunctions(NamedTuple):
    """The parts of a step beside the layers: by formula (`ops.cuda`), or as Triton kernels (`ops.cuda.kernels`)."""

    prepare: Callable[..., None]
    edit: Callable[..., None]
    sample: Callable[..., None]
    match: Callable[..., None]
    move: Callable[..., None]
    commit: Callable[..., None]

    @classmethod
    def choose(cls, device: torch.device) -> DeviceFunctions:
        """The kernels on a GPU, the formulas elsewhere.

        Raises:
            ConfigError: triton is not installed.
        """
        if device.type == "cuda":
            try:
                from forerun.ops.cuda.kernels import edits, sampling, steps
            except ImportError as error:
                raise ConfigError(
                    f"device_step: on a GPU it needs triton ({error}); pip install 'forerun[cuda]', or leave it out"
                ) from None
        else:
            from forerun.ops.cuda import edits, sampling, steps  # type: ignore[no-redef]
        return cls(steps.prepare, edits.edit, sampling.sample, steps.match, steps.move, steps.commit)


class _DeviceStep(NamedTuple):
    """The tensors of the step that is being computed."""

    plan: DevicePlan
    rows: StepRows
    verdicts: Verdicts


class DeviceExecutor(LocalExecutor):
    """A `LocalExecutor` that lays out rows, draws, matches, moves KV and commits by the device's own table.

    The host sends the plan, new blocks and drafts, and reads accepted nodes and tokens in one copy, never logits. It
    verifies by matching.

    Args:
        slots: the table, with a slot for each sequence of a step.
        parts: those of `LocalExecutor`.
    """

    def __init__(self, slots: DeviceSlots, **parts: Any) -> None:
        super().__init__(**parts)
        self.slots = slots
        self._compute = DeviceFunctions.choose(self.model.device)
        self._step: _DeviceStep | None = None

    def prepare(self, spec: SequenceSpec) -> None:
        """See `Executor`; a request that the tables have no room for is refused."""
        check_device_rules(spec)
        super().prepare(spec)

    def release(self, ended: Listing[EndedSequence]) -> None:
        """See `Executor`."""
        super().release(ended)
        for one in ended:
            self.slots.release(one.seq_id)

    def build_batch(self, step: PreparedStep) -> ForwardBatch:
        """The rows as the device lays them out."""
        slots = self.slots
        taken = slots.take([(state.sequence, state.spec) for state in step.states])
        for planned, draft in zip(step.sequences, step.drafts, strict=True):
            slots.place(planned.seq_id, start=planned.start, blocks=planned.blocks, draft=draft)
        values = [
            (slot if planned.num_tail else -1, planned.num_tail, len(draft), planned.reaches_end)
            for slot, planned, draft in zip(taken, step.sequences, step.drafts, strict=True)
        ]
        planned_slots, tails, most, ends = self._to_device(np.array(values, dtype=np.int32).T).unbind()
        plan = DevicePlan(slots=planned_slots, tails=tails, most_drafted=most, ends=ends)
        device, most_drafted = self.model.device, slots.table.draft_tokens.shape[1]
        rows = StepRows.empty(len(step.rows.token_ids), len(values), longest_path=most_drafted, device=device)
        verdicts = Verdicts.empty(len(values), most_drafted, device=device)
        self._compute.prepare(plan, slots.table, rows, block_size=self.cache.block_size)
        self._step = _DeviceStep(plan, rows, verdicts)
        return replace(
            super().build_batch(step),
            token_ids=rows.tokens.long(),
            positions=rows.positions.long(),
            slot_mapping=rows.kv_slots,
        )

    def verify(self, step: PreparedStep, forward: ForwardResult) -> list[Verdict | None]:
        """Draw at every row to be judged, walk down the drafts and move the KV of accepted nodes, all on the device."""
        assert self._step is not None, "the batch was built"
        plan, rows, verdicts = self._step
        first_logits, logits_rows = step.rows.first_logits, step.rows.logits_rows
        judged = [
            first + node
            for first, draft in zip(first_logits, step.drafts, strict=True)
            if first >= 0
            for node in range(1 + len(draft))
        ]
        if not judged:
            return [None] * len(first_logits)
        masks = row_masks(
            [
                JudgedSequence(state.rules, state.sequence.output_ids, draft)
                for state, draft, first in zip(step.states, step.drafts, first_logits, strict=True)
                if first >= 0
            ],
            vocab_size=self.model.vocab_size,
        )
        at = self._to_device(np.array([judged, [logits_rows[i] for i in judged]], dtype=np.int64))
        logits = forward.logits.index_select(0, at[0])  # a copy: edits are made in place
        seen = _rows_at(rows, at[1])
        token_ids, largest = torch.full_like(seen.slots, -1), torch.zeros(len(judged), device=logits.device)
        self._compute.edit(
            *(logits, seen, self.slots.table, self.slots.rules),
            row_masks=None if masks is None else self._to_device(masks.masks),
            has_row_mask=None if masks is None else self._to_device(masks.has_mask),
        )
        self._compute.sample(logits, seen, self.slots.rules, token_ids, largest)
        sampled = torch.full_like(rows.slots, -1)
        sampled[at[1]] = token_ids
        self._compute.match(plan, self.slots.table, rows, sampled, verdicts)
        if any(draft.parents is not None for draft in step.drafts):
            for entries in self.cache.stacks:
                self._compute.move(plan, rows, verdicts, entries)
        # One copy to the host: of each sequence the largest logit at its first row, and what was found.
        largest_of = dict(zip(judged, range(len(judged)), strict=True))
        roots = [largest_of.get(first, 0) for first in first_logits]
        found = torch.cat(
            [verdicts.num_accepted[:, None], verdicts.num_tokens[:, None], verdicts.accepted, verdicts.tokens], dim=1
        )
        bits = largest[self._to_device(np.array(roots, dtype=np.int64))].view(torch.int32)[:, None]
        return _verdicts(torch.cat([bits, found], dim=1), first_logits, {} if masks is None else masks.refused)

    def move_accepted(self, step: PreparedStep, verdicts: Listing[Verdict | None]) -> None:
        """Nothing is left to do: `verify` has had the device move it."""

    def commit(self, step: PreparedStep, results: Listing[SequenceResult]) -> None:
        """Commit on the device, then on the host, which both have the same text afterwards."""
        assert self._step is not None, "the batch was built"
        plan, _, verdicts = self._step
        holders = self.slots.forget_texts([planned.seq_id for planned in step.sequences])
        self._compute.commit(plan, self.slots.table, self.slots.rules, verdicts)
        super().commit(step, results)
        starts = zip(step.sequences, results, strict=True)
        self.slots.know_texts(
            holders,
            num_computed=[planned.start + planned.num_tail + len(result.accepted) for planned, result in starts],
        )
        self._step = None

    def _to_device(self, values: np.ndarray[Any, Any]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self.model.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.model.device, non_blocking=True)


def _rows_at(rows: StepRows, at: Tensor) -> StepRows:
    """The rows `at` alone, as edits and sampling read them; a parent that is not among them is -1."""
    place = torch.full((len(rows.slots) + 1,), -1, dtype=torch.int32, device=at.device)
    place[at] = torch.arange(len(at), dtype=torch.int32, device=at.device)
    return replace(
        rows,
        tokens=rows.tokens[at],
        positions=rows.positions[at],
        slots=rows.slots[at],
        parents=place[rows.parents[at].long()],  # the last place, where -1 leads, is none
    )


def _verdicts(found: Tensor, first_logits: Listing[int], refused: Mapping[int, ForerunError]) -> list[Verdict | None]:
    """Verdicts of [N, 3 + K + K + 1] int32: bits of the largest logit, two counts, accepted nodes, tokens.

    `refused` says why rules gave no answer, by the sequence's place among those that are judged.
    """
    host = found.cpu()
    largest = host[:, 0].clone().view(torch.float32).tolist()
    most_drafted = (host.shape[1] - 4) // 2
    verdicts: list[Verdict | None] = []
    judged = count()
    for first, logit, (_, num_accepted, num_tokens, *lists) in zip(first_logits, largest, host.tolist(), strict=True):
        if first < 0:
            verdicts.append(None)
            continue
        error = refused.get(next(judged))
        if error is not None:
            verdicts.append(_failure(error))
        elif num_tokens:
            verdicts.append(Verdict(tuple(lists[:num_accepted]), lists[most_drafted + num_tokens - 1]))
        else:
            verdicts.append(_failure(_reason(logit)))
    return verdicts


def _failure(error: ForerunError) -> Verdict | None:
    """The verdict where nothing could be drawn; None where it can be in a later step."""
    if isinstance(error, GrammarNotReadyError):
        return None
    return Verdict((), 0, error=str(error), error_kind=error.kind)


def _reason(largest: float) -> ForerunError:
    """Why nothing could be drawn at a row whose largest logit is this."""
    try:
        check_largest(largest)
    except ForerunError as error:
        return error
    raise RuntimeError(f"the device drew nothing, though the largest logit is {largest}")
