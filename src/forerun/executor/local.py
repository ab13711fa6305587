"""The executor in this process: one forward pass of the target, its verification, and the drafts after it."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listing
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from threading import get_ident
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.core.batch import MOST_CANDIDATES, Candidates, ForwardBatch, ForwardResult
from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sequence import Sequence
from forerun.core.stats import StepTimes
from forerun.core.step import (
    EndedSequence,
    PendingResult,
    PlannedSequence,
    ReadyResult,
    RowLogprobs,
    Rows,
    SequenceResult,
    SequenceSpec,
    StepPlan,
    StepResult,
    lay_out,
)
from forerun.drafters.base import Drafter, DraftRequest, KeepsKV
from forerun.drafters.guard import GuardedDrafter
from forerun.errors import ConfigError, DeviceLostError
from forerun.executor.batch import BatchBuilder
from forerun.executor.hidden_states import HiddenStatesExporter
from forerun.executor.host_copies import as_current
from forerun.executor.moved_blocks import read_blocks, write_blocks
from forerun.executor.verified_rows import verified_rows
from forerun.grammar.cache import GrammarCache
from forerun.grammar.drafting import KnownTexts, forced_draft
from forerun.kv.cache import KVCache
from forerun.kv.transfer import BlockContents
from forerun.models.base import TargetModel
from forerun.ops.attention import Attend, Attention
from forerun.ops.cuda.failures import device_failure
from forerun.ops.native.attention import NativeAttention
from forerun.ops.sampling import SamplingRules, token_logprobs
from forerun.verify.base import Verdict, Verifier, VerifyRequest

if TYPE_CHECKING:
    from forerun.drafters.pool_folder import PoolFolder


@dataclass(slots=True)
class SequenceState:
    """What is known here of one sequence: more than the engine's plan says where a result is not applied yet."""

    spec: SequenceSpec
    sequence: Sequence
    rules: SamplingRules
    draft: Draft = NO_DRAFT
    num_computed: int = 0  # tokens with KV, after the last step
    has_ended: bool = False  # by a stop token or its length; stop strings are the engine's


@dataclass(slots=True)
class PreparedStep:
    """A plan with all that its rows depend on."""

    sequences: Listing[PlannedSequence]
    rows: Rows
    states: list[SequenceState]
    drafts: list[Draft]


logger = logging.getLogger(__name__)


def committed_tail(planned: PlannedSequence, state: SequenceState) -> list[int]:
    """The committed tokens that a planned sequence's rows begin with."""
    return state.sequence.tokens_between(planned.start, planned.start + planned.num_tail)


class LocalExecutor:
    """Runs the target, the verifier and the drafter over the KV cache that it owns.

    Args:
        model: the target.
        attention: how the target attends to the cache.
        cache: keys, values and features of all sequences.
        verifier: decides which part of each draft stands.
        drafting: drafts for the next step; its failures cost drafts, never text.
        grammars: compile what texts must match.
        torch_threads: torch's threads during a step.
        exporter: saves hidden states of sequences that end; None where they are not saved.
    """

    def __init__(
        self,
        *,
        model: TargetModel,
        attention: Attention,
        cache: KVCache,
        verifier: Verifier,
        drafting: GuardedDrafter,
        grammars: GrammarCache,
        torch_threads: AbstractContextManager[None],
        exporter: HiddenStatesExporter | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.drafting = drafting
        self.exporter = exporter
        self.pools: PoolFolder | None = None
        self._attention = attention
        self._verifier = verifier
        self._known = KnownTexts()
        self._grammars = grammars
        self._torch_threads = torch_threads
        self._builder = BatchBuilder(
            block_size=cache.block_size,
            device=model.device,
            features=drafting.drafter.needs,
            num_candidates=_num_candidates(model, drafting.drafter),
            vocab_size=model.vocab_size,
        )
        self._states: dict[int, SequenceState] = {}
        self._last_number = 0  # of the plan that was executed last
        self._num_failures = 0  # of drafting, outside the drafter's guard
        self._inside: set[int] = set()  # threads that are in `as_in_a_step`
        self._loss: DeviceLostError | None = None  # why nothing more can be computed
        self._no_autograd = torch.inference_mode()  # made once: a new one for each step takes twice as long to enter

    def keep_pools(self, pools: PoolFolder) -> None:
        """Save the drafter's pools from time to time, and when nobody uses this any more or the interpreter ends."""
        self.pools = pools
        weakref.finalize(self, pools.save)

    def replace_drafter(self, drafter: Drafter) -> None:
        """Draft with another drafter from the next step on, for running sequences too; to be called between two steps.

        What it needs of texts that were read before is in the cache, so it catches up with them by itself.

        Raises:
            ConfigError: it needs hidden states that are not kept here, or other scratch blocks of the target's cache; nothing has
                changed then.
        """
        missing = drafter.needs - self.cache.features.keys()
        if missing:
            raise ConfigError(
                f"head: reads {', '.join(sorted(missing))} of the target; here are kept "
                f"{', '.join(sorted(self.cache.features)) or 'none'}; start the engine with a head that reads the same"
            )
        num_scratch = [
            one.num_scratch_blocks if isinstance(one, KeepsKV) else 0 for one in (self.drafting.drafter, drafter)
        ]
        if num_scratch[0] != num_scratch[1]:
            raise ConfigError(
                f"head: writes drafts to {num_scratch[1]} scratch blocks of the target's cache, the one before to {num_scratch[0]}; "
                "start the engine with this head"
            )
        if isinstance(drafter, KeepsKV):
            drafter.use_kv(self.cache, num_blocks=self.cache.num_blocks - num_scratch[0])
        states = list(self._states.values())  # at once, under the GIL: other threads prepare and release meanwhile
        self.drafting.replace(drafter, [state.sequence for state in states])

    def prepare(self, spec: SequenceSpec) -> None:
        """See `Executor`."""
        sampling = spec.sampling
        rules = SamplingRules(
            sampling,
            prompt_ids=spec.prompt_ids,
            vocab_size=self.model.vocab_size,
            stop_token_ids=spec.stop_token_ids,
            bad_words_ids=spec.bad_words_ids,
            grammar=None if sampling.constraint is None else self._grammars.begin(sampling.constraint),
        )
        sequence = Sequence(
            seq_id=spec.seq_id,
            prompt_ids=list(spec.prompt_ids),  # drafters see it, and those of others may write there
            output_ids=list(spec.output_ids),
            sampling=sampling,
            seed=spec.seed,
            cache_salt=spec.cache_salt,
            prediction_ids=spec.prediction_ids,
        )
        self._states[spec.seq_id] = SequenceState(spec, sequence, rules)

    def execute(self, plan: StepPlan) -> PendingResult:
        """See `Executor`; the step is over when this returns."""
        with self._computing():
            result = self._execute(plan)
        if self.pools is not None:
            self.pools.save_when_due()
        return ReadyResult(result)

    def read_blocks(self, blocks: Listing[int], digests: Listing[bytes]) -> tuple[BlockContents, ...]:
        """See `Executor`."""
        with self.as_in_a_step():
            return read_blocks(self.cache, self.drafting.drafter, blocks, digests)

    def write_blocks(
        self, blocks: Listing[int], digests: Listing[bytes], caches: Listing[BlockContents], *, first: int
    ) -> None:
        """See `Executor`."""
        with self.as_in_a_step():
            write_blocks(self.cache, self.drafting.drafter, blocks, digests, caches, first=first)

    def check_health(self) -> None:
        """See `Executor`."""
        self.cache.check_health()
        if self._loss is not None:
            raise self._loss

    def release(self, ended: Listing[EndedSequence]) -> None:
        """See `Executor`."""
        for one in ended:
            state = self._states.pop(one.seq_id, None)
            if state is None:
                continue
            del state.sequence.output_ids[one.num_output_tokens :]
            try:
                if one.hidden_states_path is not None and self.exporter is not None:
                    self.exporter.save(state.sequence, one, self.cache)
            finally:
                self._stop_drafting(state.sequence)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """What a step computes under; errors of the device are named."""
        try:
            if get_ident() in self._inside:
                yield
            else:
                with as_current(self.model.device), self._no_autograd, self._torch_threads:
                    yield
        except RuntimeError as error:
            failure = device_failure(error)
            if failure is None:
                raise
            if isinstance(failure, DeviceLostError):
                self._loss = failure
            raise failure from error

    @contextmanager
    def as_in_a_step(self) -> Iterator[None]:
        """See `Executor`; also for passes and drafts outside of a step: no autograd, torch's threads, the GPU as the current one."""
        thread = get_ident()
        is_outermost = thread not in self._inside
        self._inside.add(thread)
        try:
            with as_current(self.model.device), torch.inference_mode(), self._torch_threads:
                yield
        finally:
            if is_outermost:
                self._inside.discard(thread)

    def prepare_pass(self, batch: ForwardBatch) -> Attend:
        """What all layers of one pass share (host work, counted as building the batch)."""
        return self._attention.begin(batch, self.cache)

    def forward(self, batch: ForwardBatch, attend: Attend) -> ForwardResult:
        """Logits at the wanted rows; the features that the drafter asked for are kept in the cache."""
        result = self.model.forward(batch, attend)
        self.cache.keep(batch.slot_mapping, result.features)
        return result

    def _execute(self, plan: StepPlan) -> StepResult:
        clock = time.perf_counter
        started = clock()
        states = self._meet(plan)
        self._check_order(plan)
        step = self._settle(plan, states)
        if not step.rows.token_ids:  # all that was pending has ended
            self._last_number = plan.number
            return self._empty_result(step)
        batch = self._builder.build(step.sequences, step.rows, step.drafts)
        attend = self.prepare_pass(batch)
        built = clock()
        forward = self.forward(batch, attend)
        logits = forward.logits
        computed = clock()
        verdicts = self.verify(step, forward)
        results = self._results(step, verdicts, logits)
        self._last_number = plan.number
        self.move_accepted(step, verdicts)
        self.commit(step, results)
        verified = clock()
        self._go_on_drafting(step, results, forward.candidates)
        return StepResult(
            sequences=results,
            times=StepTimes(
                build=built - started,
                forward=computed - built,
                verify=verified - computed,
                draft=clock() - verified,
                num_steps=1,
            ),
            num_failed_drafts=self._num_failed_drafts,
        )

    @property
    def _num_failed_drafts(self) -> int:
        return self.drafting.num_failures + self._num_failures

    def _empty_result(self, step: PreparedStep) -> StepResult:
        """The result of a step without rows."""
        return StepResult(
            sequences=[SequenceResult() for _ in step.sequences],
            times=StepTimes(num_steps=1),
            num_failed_drafts=self._num_failed_drafts,
        )

    def _meet(self, plan: StepPlan) -> list[SequenceState]:
        """The states of a plan's sequences, also of those that were not prepared."""
        known = self._states
        for spec in plan.new:
            if spec.seq_id not in known:
                self.prepare(spec)
        return [known[planned.seq_id] for planned in plan.sequences]

    def _check_order(self, plan: StepPlan) -> None:
        if plan.is_pending and plan.number != self._last_number + 1:
            raise RuntimeError("the result of a step was lost while the next was planned; abort the requests in flight")

    def _settle(
        self,
        plan: StepPlan,
        known: Listing[SequenceState],
        tail_of: Callable[[PlannedSequence, SequenceState], list[int]] = committed_tail,
    ) -> PreparedStep:
        """The plan as it is, or with the rows that pending sequences really have, which begin with the tokens of `tail_of`."""
        is_as_planned = not plan.is_pending
        states: list[SequenceState] = []
        drafts: list[Draft] = []
        for planned, state in zip(plan.sequences, known, strict=True):
            draft = state.draft.first(planned.num_draft) if planned.num_draft else NO_DRAFT
            if is_planned_again(planned, state):
                state, draft, is_as_planned = self._rewind(state, planned.start + planned.num_tail), NO_DRAFT, False
            states.append(state)
            drafts.append(draft)
        if is_as_planned:
            return PreparedStep(plan.sequences, plan.rows, states, drafts)
        sequences = [
            _settled(planned, state, draft)
            for planned, state, draft in zip(plan.sequences, states, drafts, strict=True)
        ]
        drafts = [draft if planned.reaches_end else NO_DRAFT for planned, draft in zip(sequences, drafts, strict=True)]
        tails = [tail_of(planned, state) for planned, state in zip(sequences, states, strict=True)]
        return PreparedStep(sequences, lay_out(sequences, tails, drafts, block_size=plan.block_size), states, drafts)

    def _rewind(self, state: SequenceState, num_tokens: int) -> SequenceState:
        """Begin a sequence again at an earlier length: rules and drafters know texts only that grow."""
        self._stop_drafting(state.sequence)
        output_ids = state.sequence.output_ids[: num_tokens - len(state.spec.prompt_ids)]
        self.prepare(state.spec)
        again = self._states[state.spec.seq_id]
        again.sequence.output_ids[:] = output_ids
        return again

    def _stop_drafting(self, sequence: Sequence) -> None:
        self.drafting.stop(sequence)
        self._known.stop(sequence)

    def verify(self, step: PreparedStep, forward: ForwardResult) -> list[Verdict | None]:
        """A verdict for each sequence that has something to judge."""
        requests = [
            VerifyRequest(
                draft=draft,
                first_row=row,
                rules=state.rules,
                seed=state.spec.seed,
                position=len(state.sequence),
                output_ids=state.sequence.output_ids,
            )
            for state, draft, row in zip(step.states, step.drafts, step.rows.first_logits, strict=True)
            if row >= 0
        ]
        verdicts = iter(self._verifier.verify(forward.logits, requests, forward.candidates) if requests else ())
        return [next(verdicts) if row >= 0 else None for row in step.rows.first_logits]

    def _results(self, step: PreparedStep, verdicts: Listing[Verdict | None], logits: Tensor) -> list[SequenceResult]:
        """What each sequence gets, before anything here has changed: reading logits for logprobs may fail."""
        results = []
        rows = step.rows
        for i, (planned, verdict) in enumerate(zip(step.sequences, verdicts, strict=True)):
            if verdict is None:
                result = SequenceResult()
            elif verdict.error is not None:
                result = SequenceResult(error=verdict.error, error_kind=verdict.error_kind)
            else:
                drafted, accepted = step.drafts[i].token_ids, verdict.accepted
                token_ids = (
                    [*(drafted[node] for node in accepted), verdict.token_id] if accepted else [verdict.token_id]
                )
                result = SequenceResult(accepted, token_ids)
                num_top = step.states[i].spec.sampling.logprobs
                if num_top is not None:
                    judged = [rows.first_logits[i] + 1 + node for node in (-1, *accepted)]
                    result.logprobs = token_logprobs(logits[judged], token_ids, num_top)
            if planned.num_prompt_logits:
                result.prompt_logprobs = self._prompt_logprobs(step, i, logits)
            results.append(result)
        return results

    def _prompt_logprobs(self, step: PreparedStep, i: int, logits: Tensor) -> RowLogprobs:
        """Of the prompt tokens that the leading rows of sequence `i` predict."""
        planned, spec, first = step.sequences[i], step.states[i].spec, step.rows.first_prompt_logits[i]
        place, count = planned.start + 1, planned.num_prompt_logits
        token_ids = spec.prompt_ids[place : place + count]
        return token_logprobs(logits[first : first + count], token_ids, spec.sampling.prompt_logprobs or 0)

    def move_accepted(self, step: PreparedStep, verdicts: Listing[Verdict | None]) -> None:
        """Move the KV of accepted nodes to the places right after the tail, where a chain's already are."""
        if all(draft.parents is None for draft in step.drafts):
            return
        sources: list[int] = []
        destinations: list[int] = []
        rows = step.rows
        for planned, verdict, draft, row in zip(step.sequences, verdicts, step.drafts, rows.first_rows, strict=True):
            if draft.parents is None or verdict is None or verdict.accepted == tuple(range(len(verdict.accepted))):
                continue
            first = row + planned.num_tail
            sources += (rows.slots[first + node] for node in verdict.accepted)
            destinations += rows.slots[first : first + len(verdict.accepted)]
        if not sources:
            return
        if isinstance(self._attention, NativeAttention) and type(self.cache) is KVCache:
            self._attention.move(self.cache, sources, destinations)
        else:
            device = self.cache.layers[0].key.device
            self.cache.move(torch.tensor(sources, device=device), torch.tensor(destinations, device=device))

    def commit(self, step: PreparedStep, results: Listing[SequenceResult]) -> None:
        """Append what was decided to the sequences' tokens."""
        for planned, state, result in zip(step.sequences, step.states, results, strict=True):
            state.num_computed = planned.start + planned.num_tail + len(result.accepted)
            if not planned.reaches_end:
                continue
            if not result.is_decided:  # its newest token is computed again, with the same draft
                state.num_computed -= 1
                continue
            state.draft = NO_DRAFT
            output_ids, spec = state.sequence.output_ids, state.spec
            if spec.may_end(len(output_ids), result.token_ids):
                first = len(output_ids) + 1
                state.has_ended = any(spec.ends(first + i, token_id) for i, token_id in enumerate(result.token_ids))
            output_ids += result.token_ids
            if result.error is not None:
                state.has_ended = True

    def _go_on_drafting(
        self, step: PreparedStep, results: Listing[SequenceResult], candidates: Candidates | None
    ) -> None:
        """Let the drafter learn, and get the drafts for the next step; whatever fails here costs drafts only."""
        try:
            if self.drafting.num_candidates and candidates is not None and step.rows.logits_rows:
                self._learn(step, candidates)
            self.draft(step.sequences, step.states, results)
        except Exception as error:  # the tokens stand; that there are no drafts costs time only
            if isinstance(device_failure(error), DeviceLostError):
                raise
            self._num_failures += 1
            if self._num_failures == 1:
                logger.exception(
                    "drafting failed; the step's drafts are dropped, the text is not affected; "
                    "further failures are only counted"
                )

    def _learn(self, step: PreparedStep, candidates: Candidates) -> None:
        """Show the drafter what the target found at the step's rows, also at those that were drafted and did not stand."""
        states = step.states
        released = {state.spec.seq_id for state in states if self._states.get(state.spec.seq_id) is not state}
        sequences = [state.sequence for state in states]
        self.drafting.learn(
            verified_rows(step.sequences, sequences, step.drafts, step.rows, candidates, released=released)
        )

    def draft(
        self, sequences: Listing[PlannedSequence], states: Listing[SequenceState], results: Listing[SequenceResult]
    ) -> None:
        """Get the bets that the next step will verify; here the drafter first hears of a sequence.

        So it keeps nothing for those that only wait, however many they are.
        """
        asked: list[DraftRequest] = []
        drafted: list[tuple[SequenceState, SequenceResult]] = []
        block_size = self.cache.block_size
        for planned, state, result in zip(sequences, states, results, strict=True):
            if state.has_ended:
                continue
            self.drafting.start(state.sequence)
            self._known.start(state.sequence)
            if not result.is_decided:
                continue
            # One place is the target's own token's: a draft deeper than the rest could never be used.
            room = state.spec.max_length - len(state.sequence) - 1
            depth = min(planned.draft_limit, room)
            if depth <= 0:
                if planned.forced_limit and state.rules.grammar is not None:
                    most = min(planned.forced_limit, room)
                    state.draft = result.draft = forced_draft(state.rules.grammar, state.sequence.output_ids, most=most)
                continue
            num_blocks = -(-state.num_computed // block_size)
            asked.append(
                DraftRequest(
                    state.sequence,
                    planned.draft_limit,
                    depth,
                    state.num_computed,
                    planned.blocks[:num_blocks],
                    state.rules,
                    planned.min_survival,
                )
            )
            drafted.append((state, result))
        if not asked:
            return
        drafts = self._known.propose(asked, self.drafting, self.cache.features)
        for (state, result), draft in zip(drafted, drafts, strict=True):
            state.draft = draft
            result.draft = draft if draft.probs is None else replace(draft, probs=None)


def _num_candidates(model: TargetModel, drafter: Drafter) -> int:
    """As many of a row's likeliest tokens as the drafter learns from; at least one, for greedy requests, where it costs nothing.

    Raises:
        ConfigError: the drafter asks for more than a pass finds.
    """
    wanted = int(getattr(drafter, "num_candidates", 0))
    if not 0 <= wanted <= MOST_CANDIDATES:
        raise ConfigError(
            f"drafter {type(drafter).__name__}: num_candidates is {wanted}; may be from 0 to {MOST_CANDIDATES}"
        )
    return min(max(wanted, 1 if model.finds_candidates else 0), model.vocab_size)


def is_planned_again(planned: PlannedSequence, state: SequenceState) -> bool:
    """Whether the engine never got the result of a step, which was interrupted, and plans from the text as it was before."""
    num_tokens = planned.start + planned.num_tail
    return planned.reaches_end and not planned.is_pending and num_tokens != len(state.sequence)


def _settled(planned: PlannedSequence, state: SequenceState, draft: Draft) -> PlannedSequence:
    """A planned sequence with the draft that there is, where the step before really ended; no rows where it ended the text."""
    if not planned.is_pending:
        return replace(planned, num_draft=len(draft))
    if state.has_ended:
        return replace(planned, start=state.num_computed, num_tail=0, num_draft=0, reaches_end=False, is_pending=False)
    return replace(planned, start=state.num_computed, num_draft=len(draft), is_pending=False)
