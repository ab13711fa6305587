"""The executor whose texts, rules and drafts lie in tables on the device, where rows are laid out and tokens drawn and matched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, ForwardResult
from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.step import EndedSequence, PlannedSequence, SequenceResult, SequenceSpec
from forerun.drafters.base import Drafter, DraftRequest
from forerun.drafters.device_chains import DeviceChains, DraftsOnDevice
from forerun.errors import ConfigError, ForerunError
from forerun.executor.device_ngrams import AskedDrafts, DeviceNgrams
from forerun.executor.device_results import pack, unpack
from forerun.executor.device_slots import DeviceSlots, Holder, check_device_rules
from forerun.executor.local import LocalExecutor, PreparedStep, SequenceState
from forerun.executor.row_masks import JudgedSequence, row_masks
from forerun.ops.attention import Attend
from forerun.ops.cuda.passes import DeviceAttention
from forerun.ops.cuda.table import DevicePlan, StepRows, Verdicts
from forerun.verify.base import Verdict

logger = logging.getLogger(__name__)


class DeviceFunctions(NamedTuple):
    """The parts of a step beside the layers: by formula (`ops.cuda`), or as Triton kernels (`ops.cuda.kernels`)."""

    prepare: Callable[..., None]
    edit: Callable[..., None]
    sample: Callable[..., None]
    match: Callable[..., None]
    move: Callable[..., None]
    commit: Callable[..., None]
    propose: Callable[..., None]

    @classmethod
    def choose(cls, device: torch.device) -> DeviceFunctions:
        """The kernels on a GPU, the formulas elsewhere.

        Raises:
            ConfigError: triton is not installed.
        """
        if device.type == "cuda":
            try:
                from forerun.ops.cuda.kernels import edits, ngram, sampling, steps
            except ImportError as error:
                raise ConfigError(
                    f"device_step: on a GPU it needs triton ({error}); pip install 'forerun[cuda]', or leave it out"
                ) from None
        else:
            from forerun.ops.cuda import edits, ngram, sampling, steps  # type: ignore[no-redef]
        return cls.of(edits=edits, ngram=ngram, sampling=sampling, steps=steps)

    @classmethod
    def of(cls, *, edits: Any, ngram: Any, sampling: Any, steps: Any) -> DeviceFunctions:
        """Those of four modules of one kind."""
        return cls(steps.prepare, edits.edit, sampling.sample, steps.match, steps.move, steps.commit, ngram.propose)


@dataclass(slots=True, kw_only=True)
class _DeviceStep:
    """The tensors of the step that is being computed, and what is known of it on the host."""

    plan: DevicePlan
    asked: AskedDrafts
    rows: StepRows
    verdicts: Verdicts
    has_own_drafts: list[bool]  # of each sequence: whether the device drafts for it
    most_asked: int = 0  # tokens of the longest draft that the device is asked for
    holders: list[Holder] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)  # that the device made


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
        self._ngrams = DeviceNgrams.of(self.drafting.drafter, slots.table, self._compute.propose)
        self._chains = self._chains_of(self.drafting.drafter)
        self._step: _DeviceStep | None = None

    def _chains_of(self, drafter: Drafter) -> DeviceChains | None:
        """What drafts a drafter's chains on the device, if anything can."""
        if not isinstance(drafter, DraftsOnDevice):
            return None
        return drafter.on_device(self.slots.table, self.slots.rules, self._compute.sample)

    def replace_drafter(self, drafter: Drafter) -> None:
        """See `LocalExecutor`."""
        super().replace_drafter(drafter)
        self._chains = self._chains_of(drafter)

    def prepare(self, spec: SequenceSpec) -> None:
        """See `Executor`; a request that the tables have no room for is refused."""
        check_device_rules(spec)
        super().prepare(spec)

    def release(self, ended: Listing[EndedSequence]) -> None:
        """See `Executor`."""
        super().release(ended)
        for one in ended:
            self.slots.release(one.seq_id)
            if self._chains is not None:
                self._chains.forget(one.seq_id)

    def build_batch(self, step: PreparedStep) -> ForwardBatch:
        """The rows as the device lays them out."""
        slots = self.slots
        taken = slots.take([(state.sequence, state.spec) for state in step.states])
        for planned, draft in zip(step.sequences, step.drafts, strict=True):
            slots.place(planned.seq_id, start=planned.start, blocks=planned.blocks, draft=draft)
        has_own_drafts = [
            self._drafts_on_device(planned, state) for planned, state in zip(step.sequences, step.states, strict=True)
        ]
        values = [
            (
                slot if planned.num_tail else -1,
                planned.num_tail,
                len(draft),
                planned.reaches_end,
                slot if drafts and planned.reaches_end and planned.num_tail and planned.draft_limit else -1,
                planned.draft_limit,
                state.spec.max_length,
            )
            for slot, planned, state, draft, drafts in zip(
                taken, step.sequences, step.states, step.drafts, has_own_drafts, strict=True
            )
        ]
        sent = self._to_device(np.array(values, dtype=np.int32).T).unbind()
        plan = DevicePlan(slots=sent[0], tails=sent[1], most_drafted=sent[2], ends=sent[3])
        device, most_drafted = self.model.device, slots.table.draft_tokens.shape[1]
        rows = StepRows.empty(len(step.rows.token_ids), len(values), longest_path=most_drafted, device=device)
        verdicts = Verdicts.empty(len(values), most_drafted, device=device)
        self._compute.prepare(plan, slots.table, rows, block_size=self.cache.block_size)
        self._step = _DeviceStep(
            plan=plan, asked=AskedDrafts(*sent[4:]), rows=rows, verdicts=verdicts, has_own_drafts=has_own_drafts
        )
        self._step.most_asked = max((limit for *_, slot, limit, _ in values if slot >= 0), default=0)
        return replace(
            super().build_batch(step),
            token_ids=rows.tokens.long(),
            positions=rows.positions.long(),
            slot_mapping=rows.kv_slots,
        )

    def prepare_pass(self, batch: ForwardBatch) -> Attend:
        """Attention by a step's rows as the device laid them out, or by a batch that is none of `build_batch`."""
        rows = None if self._step is None else self._step.rows
        if rows is None or batch.slot_mapping is not rows.kv_slots or not isinstance(self._attention, DeviceAttention):
            return super().prepare_pass(batch)
        return self._attention.begin_step(rows, self.slots.table.block_table, self.cache)

    def verify(self, step: PreparedStep, forward: ForwardResult) -> list[Verdict | None]:
        """Judge, move the KV of accepted nodes, commit and draft, all on the device; then read what was found, in one copy."""
        assert self._step is not None, "the batch was built"
        now, most_drafted = self._step, self.slots.table.draft_tokens.shape[1]
        refused, largest = self._judge(step, forward)
        if any(draft.parents is not None for draft in step.drafts):
            for entries in self.cache.stacks:
                self._compute.move(now.plan, now.rows, now.verdicts, entries)
        now.holders = self.slots.forget_texts([planned.seq_id for planned in step.sequences])
        self._compute.commit(now.plan, self.slots.table, self.slots.rules, now.verdicts)
        if largest is None:
            now.drafts = [NO_DRAFT] * len(now.holders)
            return [None] * len(now.holders)
        drafted = self._draft_on_device(now) if now.most_asked else None
        found = unpack(
            pack(now.verdicts, largest, drafted),
            most_drafted=most_drafted,
            refused=refused,
            is_judged=[first >= 0 for first in step.rows.first_logits],
            source=self.drafting.source,
        )
        now.drafts = found.drafts
        return found.verdicts

    def _draft_on_device(self, now: _DeviceStep) -> Tensor | None:
        """Draft for the sequences that are asked for: [N, 1 + K], see `DeviceNgrams.propose`; None where that failed."""
        if self._ngrams is not None:
            return self._ngrams.propose(now.asked)
        assert self._chains is not None, "one of the two drafts"
        table, asked = self.slots.table, now.asked
        num_computed = table.computed[asked.slots.clamp(min=0).long()] - now.plan.tails - now.verdicts.num_accepted
        try:
            self._chains.propose(
                asked.slots,
                asked.rooms(table) * (now.verdicts.num_tokens > 0),
                num_computed,
                self.cache.features,
                most_tokens=now.most_asked,
            )
        except Exception:  # the tokens stand; that there are no drafts costs time only
            logger.exception(
                "drafting on the device failed; from now on the host asks the drafter, the text is not affected"
            )
            self._chains = None
            return None
        return asked.drafts(table)

    def _judge(self, step: PreparedStep, forward: ForwardResult) -> tuple[dict[int, ForerunError], Tensor | None]:
        """Draw at every row to be judged and walk down the drafts.

        Returns:
            Why rules gave no answer, by the sequence's place in the step; the largest logit [N] where the first token of
            each sequence was drawn, or None where nothing was to be judged.
        """
        assert self._step is not None, "the batch was built"
        plan, rows = self._step.plan, self._step.rows
        first_logits, logits_rows = step.rows.first_logits, step.rows.logits_rows
        places = [i for i, first in enumerate(first_logits) if first >= 0]
        judged = [first_logits[i] + node for i in places for node in range(1 + len(step.drafts[i]))]
        if not judged:
            return {}, None
        masks = row_masks(
            [JudgedSequence(step.states[i].rules, step.states[i].sequence.output_ids, step.drafts[i]) for i in places],
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
        self._compute.match(plan, self.slots.table, rows, sampled, self._step.verdicts)
        place_of = {row: i for i, row in enumerate(judged)}
        roots = np.array([place_of.get(first, 0) for first in first_logits], dtype=np.int64)
        refused = {} if masks is None else {places[i]: error for i, error in masks.refused.items()}
        return refused, largest[self._to_device(roots)]

    def move_accepted(self, step: PreparedStep, verdicts: Listing[Verdict | None]) -> None:
        """Nothing is left to do: `verify` has had the device move it."""

    def commit(self, step: PreparedStep, results: Listing[SequenceResult]) -> None:
        """Commit on the host what `verify` has committed on the device: both have the same text afterwards."""
        assert self._step is not None, "the batch was built"
        super().commit(step, results)
        for holder, planned, result, draft in zip(
            self._step.holders, step.sequences, results, self._step.drafts, strict=True
        ):
            num_computed = planned.start + planned.num_tail + len(result.accepted)
            self.slots.know_text(holder, num_computed=num_computed, draft=draft)

    def draft(
        self, sequences: Listing[PlannedSequence], states: Listing[SequenceState], results: Listing[SequenceResult]
    ) -> None:
        """Take the drafts that the device has made, and get the others from the drafter."""
        assert self._step is not None, "the batch was built"
        lines = list(zip(sequences, states, results, strict=True))
        for line, draft, is_own in zip(lines, self._step.drafts, self._step.has_own_drafts, strict=True):
            planned, state, result = line
            if is_own and result.is_decided and not state.has_ended:
                state.draft = result.draft = draft
                if self._chains is not None:
                    request = self._chain_request(
                        planned, state, num_computed=state.num_computed, max_tokens=planned.draft_limit
                    )
                    self._chains.note(request, start=planned.start + planned.num_tail - 1)
        others = [line for line, is_own in zip(lines, self._step.has_own_drafts, strict=True) if not is_own]
        if others:
            super().draft(*zip(*others, strict=True))

    def _drafts_on_device(self, planned: PlannedSequence, state: SequenceState) -> bool:
        """Whether the device drafts for a sequence: where grammar or prediction know of its text, the host does."""
        knows_text = state.rules.grammar is not None or bool(state.spec.prediction_ids)
        if self._chains is None:
            return self._ngrams is not None and not knows_text
        is_asked = planned.reaches_end and planned.num_tail > 0 and not knows_text
        request = self._chain_request(
            planned, state, num_computed=planned.start + planned.num_tail - 1, max_tokens=planned.draft_limit * is_asked
        )
        return self._chains.may_draft(request, is_pending=False)

    def _chain_request(
        self, planned: PlannedSequence, state: SequenceState, *, num_computed: int, max_tokens: int
    ) -> DraftRequest:
        return DraftRequest(
            state.sequence,
            max_tokens,
            min(max_tokens, state.spec.max_length - len(state.sequence) - 1),
            num_computed,
            planned.blocks[: -(-num_computed // self.cache.block_size)],
            state.rules,
        )

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
