"""The executor whose texts, rules and drafts lie in tables on the device, which computes steps whose results are read later."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from forerun.core.batch import CandidateTensors
from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.stats import StepTimes
from forerun.core.step import (
    UNKNOWN_TOKEN,
    EndedSequence,
    PendingResult,
    PlannedSequence,
    ReadyResult,
    SequenceResult,
    SequenceSpec,
    StepPlan,
    StepResult,
)
from forerun.drafters.base import Drafter, DraftRequest
from forerun.executor.batch import sequence_rows
from forerun.executor.device_computation import (
    DeviceComputation,
    DeviceFunctions,
    HostRows,
    Ints,
    StepOutputs,
    StepTensors,
    most_asked_of,
    plan_values,
)
from forerun.executor.device_launch import Launch, in_order_of_rows, known_drafts, refused_in, wants_logits
from forerun.executor.device_results import unpack
from forerun.executor.device_slots import DeviceSlots, check_device_rules
from forerun.executor.host_copies import LateCopy, StepSpan, free_bytes, to_device
from forerun.executor.local import LocalExecutor, PreparedStep, SequenceState, is_planned_again
from forerun.executor.row_masks import JudgedSequence, RowMasks, row_masks
from forerun.executor.step_graphs import Recorder, StepBuffers, StepGraphs
from forerun.ops.cuda.table import StepRows, Verdicts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _LateResult:
    """The `PendingResult` of a launch."""

    executor: DeviceExecutor
    launch: Launch

    def result(self) -> StepResult:
        """See `PendingResult`."""
        return self.executor.read(self.launch)


class DeviceExecutor(LocalExecutor):
    """A `LocalExecutor` that has the device lay out rows, draw, match, move KV, commit and draft by its own table.

    A step may be begun before the one before was read: the table knows how that went, and the plan's bounds only say how many
    rows there may be. So it is wherever nobody on the host must know first: drafters, grammars and log probabilities of the
    host wait for the result, and drafts are made, before the next step is begun.

    The host sends the plan, new blocks and drafts, and reads accepted nodes and tokens in one copy, never logits, but for log
    probabilities. It verifies by matching.

    Args:
        slots: the table, with a slot for each sequence of a step.
        parts: those of `LocalExecutor`.
    """

    def __init__(self, slots: DeviceSlots, **parts: Any) -> None:
        super().__init__(**parts)
        self.slots = slots
        self.computation = DeviceComputation(
            model=self.model,
            attention=self._attention,
            cache=self.cache,
            slots=slots,
            compute=DeviceFunctions.choose(self.model.device),
            drafter=self.drafting.drafter,
            features=self._builder.features,
            num_candidates=self._builder.num_candidates,
        )
        self.graphs: StepGraphs | None = None  # None: every step is eager
        self._unread: deque[Launch] = deque()  # the oldest first
        self._drafted_there: set[int] = set()  # sequences that the device drafted for in the step that is being read
        # the sequences of the step that was begun last, and its times
        self._before: tuple[set[int], StepSpan] | None = None

    def prepare(self, spec: SequenceSpec) -> None:
        """See `Executor`; a request that the tables have no room for is refused."""
        check_device_rules(spec)
        super().prepare(spec)

    def release(self, ended: Listing[EndedSequence]) -> None:
        """See `Executor`."""
        super().release(ended)
        for one in ended:
            self.slots.release(one.seq_id)
            if self.computation.chains is not None:
                self.computation.chains.forget(one.seq_id)

    def replace_drafter(self, drafter: Drafter) -> None:
        """See `LocalExecutor`."""
        with self._computing():
            self._read_all()
        super().replace_drafter(drafter)
        self.computation.use_drafter(drafter)
        if self.graphs is not None:
            self.graphs.forget()

    def use_graphs(self, sizes: Listing[int], recorder: Recorder) -> None:
        """Record steps of these numbers of rows from now on, where the device can lay out rows by itself."""
        if self.computation.needs_host_rows:
            return
        buffers = StepBuffers(
            max(sizes),
            self.slots.num_slots,
            most_drafted=self.slots.table.draft_tokens.shape[1],
            vocab_size=self.model.vocab_size,
            device=self.model.device,
        )
        drafts_chains = self.computation.drafts and not self.computation.drafts_trees
        has_trees = self.slots.table.draft_tokens.shape[1] > 1 and not drafts_chains
        self.graphs = StepGraphs(self._run_alone, buffers, sorted(sizes), recorder, has_trees=has_trees)
        started, before = time.perf_counter(), free_bytes(self.model.device)
        with self._computing():
            self.graphs.prepare(drafts=self.computation.drafts, shows_progress=sys.stderr.isatty())
        logger.info(
            "recorded %d CUDA graphs in %.1f s; they take %.0f MiB",
            self.graphs.num_recorded,
            time.perf_counter() - started,
            (before - free_bytes(self.model.device)) / 2**20,
        )

    def execute(self, plan: StepPlan) -> PendingResult:
        """See `Executor`; the device has the step to compute when this returns."""
        with self._computing():
            pending = self._execute_late(plan)
        if self.pools is not None:
            self.pools.save_when_due()
        return pending

    def read(self, launch: Launch) -> StepResult:
        """The result of a step, and before it those of the steps before; waits for the device."""
        with self._computing():
            while launch.result is None:
                assert self._unread, "a result that is void is not asked for"
                self._read_next()
        return launch.result

    def _execute_late(self, plan: StepPlan) -> PendingResult:
        started = time.perf_counter()
        self._drop_lost(plan)
        states = self._meet(plan)
        if self._unread and self._must_read_first(plan, states):
            self._read_all()
        self._check_order(plan)
        # With a step before it unread, what is pending is known to the device alone.
        step = None if self._unread and plan.is_pending else self._settle(plan, states)
        if step is not None:
            states = step.states
            if not step.rows.token_ids:  # all that was pending has ended
                self._last_number = plan.number
                return ReadyResult(self._empty_result(step))
        launch = self._launch(plan, states, step, started)
        self._unread.append(launch)
        self._last_number = plan.number
        self.slots.trust_texts(launch.holders)
        return _LateResult(self, launch)

    def _drop_lost(self, plan: StepPlan) -> None:
        """Forget steps whose results nobody will ask for, since their rows are planned again."""
        while self._unread and self._unread[-1].plan.number >= plan.number:
            lost = self._unread.pop()
            self.slots.forget_texts([planned.seq_id for planned in lost.plan.sequences])
            self._last_number = lost.plan.number - 1

    def _read_all(self) -> None:
        while self._unread:
            self._read_next()

    def _read_next(self) -> None:
        """Read the oldest step; it stays among the unread ones if that is interrupted."""
        self._read(self._unread[0])
        self._unread.popleft()

    def _must_read_first(self, plan: StepPlan, states: Listing[SequenceState]) -> bool:
        """Whether the host must know how the step before went before this one can begin."""
        before = self._unread[-1]
        if len(self._unread) > 1 or before.is_wanted_first or (plan.is_pending and self.computation.needs_host_rows):
            return True
        is_ahead = {planned.seq_id for planned in before.plan.sequences}
        for planned, state in zip(plan.sequences, states, strict=True):
            asks_host = planned.num_prompt_logits or (planned.reaches_end and state.rules.has_masks)
            if asks_host and plan.is_pending:
                return True
            if planned.seq_id in is_ahead and not self.slots.has_text(state.sequence):
                return True  # the text is to be written again, and not all of it is known
            if is_planned_again(planned, state):
                return True
        return False

    def _launch(self, plan: StepPlan, states: list[SequenceState], step: PreparedStep | None, started: float) -> Launch:
        """Have the device compute a step; `step` None: the host does not know its rows exactly."""
        sequences = plan.sequences if step is None else step.sequences
        drafted = [self._drafts_on_device(planned, state) for planned, state in zip(sequences, states, strict=True)]
        drafts = known_drafts(sequences, states) if step is None else step.drafts
        taken = self._place(sequences, states, drafts, is_settled=step is not None)
        num_rows = len(plan.rows.token_ids if step is None else step.rows.token_ids)
        masks = None if step is None else self._masks(step)
        values = plan_values(sequences, taken, drafted)
        most_asked = most_asked_of(values)
        host = None if step is None else self._host_rows(step)
        has_trees = self.computation.drafts_trees or any(draft.parents is not None for draft in drafts)
        reads_logits = wants_logits(sequences, states)
        holders = self.slots.forget_texts([planned.seq_id for planned in sequences])
        built, on_device = time.perf_counter(), self._send(values)
        recorded = None
        if self.graphs is not None and not reads_logits:
            recorded = self.graphs.ready(
                on_device,
                masks,
                num_rows=num_rows,
                has_trees=has_trees,
                drafts=most_asked > 0 or self.computation.always_drafts,
            )
        if recorded is not None:
            span = StepSpan(self.model.device)
            recorded.replay()
            outputs = recorded.outputs
        else:
            tensors = self._tensors(on_device, masks, sequences, num_rows=num_rows)
            span = StepSpan(self.model.device)
            outputs = self.computation.run(tensors, host, has_trees=has_trees, most_asked=most_asked)
        span.end()
        copy = LateCopy(outputs.packed[: len(sequences)])
        if not reads_logits:
            outputs = replace(outputs, logits=None)
        elif step is not None:
            outputs = in_order_of_rows(outputs, step)
        launched = time.perf_counter()
        seq_ids = {planned.seq_id for planned in sequences}
        before, self._before = self._before, (seq_ids, span)
        return Launch(
            plan=plan,
            states=states,
            step=step,
            has_own_drafts=drafted,
            refused={} if step is None or masks is None else refused_in(step, masks),
            holders=holders,
            copy=copy,
            outputs=outputs,
            times=StepTimes(
                build=built - started,
                launch=launched - built,
                num_steps=1,
                num_replayed_steps=int(recorded is not None),
            ),
            span=span,
            before=None if before is None or before[0].isdisjoint(seq_ids) else before[1],
            is_wanted_first=reads_logits or self._asks_host(sequences, drafted),
        )

    def _run_alone(self, step: StepTensors, has_trees: bool, drafts: bool) -> StepOutputs:
        """A step as graphs hold it, with as many passes of a drafter as the longest draft takes."""
        most_asked = self.slots.table.draft_tokens.shape[1] if drafts and self.computation.drafts else 0
        return self.computation.run(step, None, has_trees=has_trees, most_asked=most_asked)

    def _send(self, plan: Ints) -> Tensor:
        """Send a plan, and with it what the host has changed in the table, which is written there; returns the plan on the device."""
        changes, (num_fields, num_sequences) = self.slots.changes(), plan.shape
        # Each field, and the changes, begin at sixteen bytes: so triton compiles one kernel for all numbers of sequences.
        padded = np.zeros((num_fields, -(-num_sequences // 4) * 4), dtype=np.int32)
        padded[:, :num_sequences] = plan
        sent = to_device(np.concatenate([padded.ravel(), changes.ravel()]), self.model.device)
        if changes.size:
            self.computation.compute.place(sent[padded.size :].view(4, -1), self.slots.table)
        self.slots.changes_are_sent()
        return sent[: padded.size].view(padded.shape)[:, :num_sequences]

    def _tensors(
        self, plan: Tensor, masks: RowMasks | None, sequences: Listing[PlannedSequence], *, num_rows: int
    ) -> StepTensors:
        """New tensors of a step that is not recorded, as long as it needs them."""
        device, most_drafted = self.model.device, self.slots.table.draft_tokens.shape[1]
        num_judged = sum(1 + one.num_draft for one in sequences if one.reaches_end and one.num_tail)
        rows = StepRows.empty(num_rows, len(sequences), longest_path=most_drafted, device=device, num_judged=num_judged)
        return StepTensors.of_plan(
            plan,
            rows=rows,
            verdicts=Verdicts.empty(len(sequences), most_drafted, device=device),
            masks=None if masks is None else to_device(masks.masks, device),
            has_mask=None if masks is None else to_device(masks.has_mask, device),
        )

    def _place(
        self,
        sequences: Listing[PlannedSequence],
        states: Listing[SequenceState],
        drafts: Listing[Draft],
        *,
        is_settled: bool,
    ) -> list[int]:
        """The slots of a step's sequences, where all lies that the device does not know."""
        taken = self.slots.take([(state.sequence, state.spec) for state in states])
        for planned, draft in zip(sequences, drafts, strict=True):
            self.slots.place_blocks(planned.seq_id, planned.blocks)
            if is_settled or not planned.is_pending:
                self.slots.place(planned.seq_id, start=planned.start, draft=draft)
        return taken

    def _masks(self, step: PreparedStep) -> RowMasks | None:
        """What grammars and bad words leave at each row to be judged."""
        judged = [
            JudgedSequence(state.rules, state.sequence.output_ids, draft)
            for state, draft, first in zip(step.states, step.drafts, step.rows.first_logits, strict=True)
            if first >= 0
        ]
        return row_masks(judged, vocab_size=self.model.vocab_size)

    def _host_rows(self, step: PreparedStep) -> HostRows:
        rows = [
            first + place
            for planned, first in zip(step.sequences, step.rows.first_rows, strict=True)
            for place in range(planned.num_prompt_logits)
        ]
        return HostRows(
            sequences=sequence_rows(step.sequences, step.drafts) if self.computation.needs_host_rows else [],
            prompt_logits=to_device(np.array(rows, dtype=np.int64), self.model.device),
        )

    def _asks_host(self, sequences: Listing[PlannedSequence], drafted: Listing[bool]) -> bool:
        """Whether a step's drafts come from the host, or its drafter learns from it."""
        return self.drafting.num_candidates > 0 or any(
            planned.reaches_end and planned.draft_limit > 0 and not is_own
            for planned, is_own in zip(sequences, drafted, strict=True)
        )

    def _read(self, launch: Launch) -> None:
        """Take what a step gave: the host has the same texts as the device then, and drafts what the device does not.

        Interrupted, it can be begun again.
        """
        if launch.step is None:
            launch.step = self._settle_computed(launch.plan, launch.states)
        step, times, clock = launch.step, launch.times, time.perf_counter
        if launch.lengths:
            self._take_back(launch)
        started = clock()
        packed = launch.copy.wait()
        waited = clock()
        found = unpack(
            packed,
            most_drafted=self.slots.table.draft_tokens.shape[1],
            refused=launch.refused,
            is_judged=[first >= 0 for first in step.rows.first_logits],
            source=self.drafting.source,
        )
        logits = packed if launch.outputs.logits is None else launch.outputs.logits  # nobody reads the former
        results = self._results(step, found.verdicts, logits)
        launch.lengths = [len(state.sequence.output_ids) for state in launch.states]
        self.commit(step, results)
        self._know(launch, results, found.drafts)
        verified = clock()
        self._take_drafts(launch, step, results, found.drafts)
        found_there = launch.outputs.candidates
        if found_there is not None:  # without those of padding
            num_rows = len(step.rows.logits_rows)
            found_there = CandidateTensors(found_there.token_ids[:num_rows], found_there.logits[:num_rows])
        self._go_on_drafting(step, results, found_there)
        times.forward, times.wait = launch.span.seconds, waited - started
        times.verify, times.draft = verified - waited, clock() - verified
        if self.model.device.type == "cpu":
            times.launch = 0.0  # what it took was computing
        elif launch.before is not None:
            times.idle = launch.span.idle_since(launch.before)
        launch.outputs = replace(launch.outputs, logits=None, candidates=None)  # the launch is kept until the next one
        launch.result = StepResult(sequences=results, times=times, num_failed_drafts=self._num_failed_drafts)

    def _settle_computed(self, plan: StepPlan, states: list[SequenceState]) -> PreparedStep:
        """See `_settle`, of rows that were computed, whose tokens nobody asks for: without drafts most steps are as planned.

        Texts may have been cut since, where a stop string ended them within what the step before gave.
        """
        if all(_is_as_planned(planned, state) for planned, state in zip(plan.sequences, states, strict=True)):
            return PreparedStep(plan.sequences, plan.rows, states, [NO_DRAFT] * len(states))
        return self._settle(plan, states, lambda planned, _state: [UNKNOWN_TOKEN] * planned.num_tail)

    def _take_drafts(
        self, launch: Launch, step: PreparedStep, results: Listing[SequenceResult], drafts: Listing[Draft]
    ) -> None:
        """Take over what the device has drafted, and tell the drafter which tokens its network has read there."""
        chains = self.computation.chains
        for planned, state, result, draft, is_own in zip(
            step.sequences, step.states, results, drafts, launch.has_own_drafts, strict=True
        ):
            if not is_own or not result.is_decided or state.has_ended:
                continue
            state.draft = result.draft = draft
            if chains is not None:
                request = self._chain_request(
                    planned, state, num_computed=state.num_computed, max_tokens=planned.draft_limit
                )
                chains.note(request, start=planned.start + planned.num_tail - 1)
        self._drafted_there = {
            planned.seq_id for planned, is_own in zip(step.sequences, launch.has_own_drafts, strict=True) if is_own
        }

    def _take_back(self, launch: Launch) -> None:
        """Undo what an interrupted reading has committed."""
        for state, length in zip(launch.states, launch.lengths, strict=True):
            if len(state.sequence.output_ids) > length:
                self._stop_drafting(state.sequence)
                del state.sequence.output_ids[length:]
                state.has_ended = False

    def _know(self, launch: Launch, results: Listing[SequenceResult], drafts: Listing[Draft]) -> None:
        """Note what the table holds of a step's sequences."""
        assert launch.step is not None, "the step was settled"
        for holder, planned, result, draft in zip(launch.holders, launch.step.sequences, results, drafts, strict=True):
            if planned.reaches_end and not result.token_ids:
                # the device takes a text for ended where nothing could be drawn
                self.slots.forget_texts([planned.seq_id])
            else:
                num_computed = planned.start + planned.num_tail + len(result.accepted)
                self.slots.know_text(holder, num_computed=num_computed, draft=draft)

    def draft(
        self, sequences: Listing[PlannedSequence], states: Listing[SequenceState], results: Listing[SequenceResult]
    ) -> None:
        """Get drafts for those sequences that the device has not drafted for, and that were not released since their step began."""
        lines = [
            (planned, state, result)
            for planned, state, result in zip(sequences, states, results, strict=True)
            if planned.seq_id not in self._drafted_there and self._states.get(planned.seq_id) is state
        ]
        if lines:
            super().draft(*zip(*lines, strict=True))

    def _drafts_on_device(self, planned: PlannedSequence, state: SequenceState) -> bool:
        """Whether the device drafts for a sequence: where grammar or prediction know of its text, the host does."""
        knows_text = state.rules.grammar is not None or bool(state.spec.prediction_ids)
        chains = self.computation.chains
        if chains is None:
            return self.computation.ngrams is not None and not knows_text
        is_asked = planned.reaches_end and planned.num_tail > 0 and not knows_text
        request = self._chain_request(
            planned, state, num_computed=planned.start + planned.num_tail - 1, max_tokens=planned.draft_limit * is_asked
        )
        return chains.may_draft(request, is_pending=planned.is_pending)

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


def _is_as_planned(planned: PlannedSequence, state: SequenceState) -> bool:
    """Whether a sequence without a draft got the rows that were planned for it, now that the step before has been read."""
    if planned.num_draft:
        return False
    if planned.is_pending:
        return planned.start == state.num_computed and not state.has_ended
    return not is_planned_again(planned, state)
