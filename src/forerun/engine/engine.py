"""The loop: plan a step, have it executed, apply its result."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.outputs import RequestOutput
from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import ExecutorInfo
from forerun.core.step import (
    UNKNOWN_TOKEN,
    EndedSequence,
    LateDraft,
    PendingResult,
    PlannedSequence,
    SequenceResult,
    SequenceSpec,
    StepPlan,
    StepRecord,
    StepResult,
    lay_out,
    unknown_draft,
)
from forerun.engine.client import EngineRequest, EngineSnapshot, StepOutput
from forerun.engine.commit import Committed, commit, delta, describe_logprobs
from forerun.engine.generation import SAVED, Generation
from forerun.engine.regret import ChoiceAccount
from forerun.engine.request import HiddenStatesFiles, Request, RequestProcessor
from forerun.engine.scheduler import Scheduler
from forerun.engine.speculation import SpeculationControl
from forerun.engine.stats import EngineState, EngineStats, StatsLog
from forerun.errors import ErrorKind, RequestError, StepError
from forerun.executor.base import Executor
from forerun.kv.block_pool import BlockPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of."""

    processor: RequestProcessor
    pool: BlockPool
    scheduler: Scheduler
    executor: Executor
    control: SpeculationControl
    block_size: int
    files: HiddenStatesFiles | None = None  # None: hidden states are not saved
    executor_info: ExecutorInfo | None = None  # what statistics tell of the executor


@dataclass(slots=True)
class _Flight:
    """A step that an executor has begun, and whose result is to be applied."""

    plan: StepPlan
    pending: PendingResult
    plan_seconds: float


class _Preparing:
    """Holds a request's id for one call of `accept`: after a withdrawal another call may hold the same id."""


class Engine:
    """Runs requests to their end, a step at a time: policy in integers, with no tensor in sight.

    `plan` decides who computes what, the executor computes it, `apply` commits what it found. Plain
    decoding is a draft of length zero: there is one path, whatever the drafter.

    Args:
        parts: what the engine is made of.
        delay: how many steps late results are asked for and applied: 0, or 1 to plan each step and have it begun
            before the result of the one before is known, so that a device need not wait for the host.
        clock: seconds; the engine takes no other time.
    """

    def __init__(self, parts: EngineParts, *, delay: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.stats = EngineStats()
        self._parts = parts
        self._delay = delay
        self._clock = clock
        self._accepting = threading.Lock()  # guards the next
        self._accepted: dict[str, Request | _Preparing] = {}  # not submitted
        self._requests: dict[str, Request] = {}
        self._generations: dict[int, Generation] = {}  # of these requests, by seq_id
        self._flights: deque[_Flight] = deque()  # the oldest first
        self._num_executed = 0  # steps
        self._log = StatsLog(clock)
        self._num_failed_drafts = 0  # of the executor, since it was made
        self._num_earlier_failures = 0  # of these, before the statistics were reset
        self._earlier_counts = (0, 0, 0)  # of the scheduler, see `_scheduler_counts`, before that
        self._earlier_choices: ChoiceAccount | None = None  # of the control, likewise

    @property
    def parts(self) -> EngineParts:
        """What the engine is made of, for measuring a part alone; leave them alone while there is work."""
        return self._parts

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or a step not applied."""
        return bool(self._requests) or bool(self._flights)

    @property
    def state(self) -> EngineState:
        """What waits, what runs, how full the KV memory is."""
        pool, scheduler = self._parts.pool, self._parts.scheduler
        num_preemptions, num_queried, num_cached = (
            count - earlier for count, earlier in zip(self._scheduler_counts, self._earlier_counts, strict=True)
        )
        return EngineState(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + sum(len(r.held) for r in self._requests.values()),
            kv_usage=1 - pool.num_free / pool.num_blocks,
            num_blocks=pool.num_blocks,
            block_size=self._parts.block_size,
            num_preemptions=num_preemptions,
            num_queried_tokens=num_queried,
            num_cached_tokens=num_cached,
            num_speculative_tokens=self._parts.control.num_speculative_tokens,
            choices=None
            if (choices := self._parts.control.choices()) is None
            else choices.since(self._earlier_choices),
            executor=self._parts.executor_info,
        )

    def snapshot(self) -> EngineSnapshot:
        """The statistics and the state of this moment, as records that count no further."""
        return EngineSnapshot(copy.deepcopy(self.stats), self.state)

    def reset_stats(self) -> None:
        """Count from zero again."""
        self.stats = EngineStats()
        self._log = StatsLog(self._clock)
        self._num_earlier_failures = self._num_failed_drafts
        self._earlier_counts = self._scheduler_counts
        self._earlier_choices = self._parts.control.choices()

    @property
    def _scheduler_counts(self) -> tuple[int, int, int]:
        """Preemptions, and prompt tokens looked up and found in the prefix cache, since the engine was made."""
        scheduler = self._parts.scheduler
        return scheduler.num_preemptions, scheduler.num_queried_tokens, scheduler.num_cached_tokens

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        cache_salt: str | None = None,
    ) -> None:
        """Accept and queue a request.

        Raises:
            RequestError: the id is in use, or the prompt or a sampling value does not fit.
        """
        request = EngineRequest(request_id=request_id, prompt_ids=prompt_ids, sampling=sampling, cache_salt=cache_salt)
        try:
            self.accept(request)
            self.submit(request_id)
        except RequestError:
            raise
        except BaseException:  # an interrupt
            self.abort(request_id)
            raise

    def accept(self, request: EngineRequest) -> None:
        """Check a request and make ready what it needs; any thread may call this at any time.

        Raises:
            RequestError: the id is in use, or the prompt or a sampling value does not fit.
        """
        request_id, preparing = request.request_id, _Preparing()
        with self._accepting:
            if request_id in self._accepted or request_id in self._requests:
                raise RequestError(f"request_id: {request_id!r} is running already; choose another")
            self._accepted[request_id] = preparing
        try:
            ready = self._parts.processor.process(request, arrival_time=self._clock())
        except BaseException:
            with self._accepting:
                if self._accepted.get(request_id) is preparing:
                    del self._accepted[request_id]
            raise
        with self._accepting:
            is_wanted = self._accepted.get(request_id) is preparing
            if is_wanted:
                self._accepted[request_id] = ready
        if not is_wanted:  # it was withdrawn meanwhile
            self._forget(ready)

    def withdraw(self, request_id: str) -> None:
        """Forget a request that was accepted and not submitted; any thread may call this at any time."""
        with self._accepting:
            request = self._accepted.pop(request_id, None)
        if isinstance(request, Request):
            self._forget(request)

    def _forget(self, request: Request) -> None:
        never_ran = [EndedSequence(seq_id=one.spec.seq_id, num_output_tokens=0) for one in request.generations]
        self._parts.executor.release(never_ran)

    def submit(self, request_id: str) -> None:
        """Queue a request that `accept` has made ready."""
        with self._accepting:
            request = self._accepted[request_id]
            assert isinstance(request, Request), "accept has returned"
            self._requests[request_id] = request
            del self._accepted[request_id]
        self._generations.update((generation.spec.seq_id, generation) for generation in request.generations)
        self._parts.scheduler.enqueue(request.generations[0])

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; return what it has given, or None if it is not running."""
        self.withdraw(request_id)
        request = self._requests.get(request_id)
        return None if request is None else self._end(request, "abort")

    def check_health(self) -> None:
        """See `EngineClient`."""
        self._parts.executor.check_health()

    def finish_files(self, output: RequestOutput) -> None:
        """Wait until the hidden states of an ended request are in their files; any thread may.

        Where they cannot be saved its `error` says why, and the path is taken back.
        """
        if self._parts.files is None:
            return
        for completion in output.outputs:
            if completion.hidden_states_path is None:
                continue
            failure = self._parts.files.finish(completion.hidden_states_path)
            if failure is not None:
                output.error = f"hidden states: cannot write {completion.hidden_states_path} ({failure}); check the disk and shared_storage_path"
                output.error_kind = ErrorKind.SERVER
                completion.hidden_states_path = None
        if output.outputs[0].hidden_states_path is None:
            output.kv_transfer_params = None

    def wait_for_files(self) -> None:
        """Wait until few files of hidden states are still to be written; for owners whose steps may wait for a disk."""
        if self._parts.files is not None:
            self._parts.files.wait_for_writers()

    def step(self) -> StepOutput:
        """Plan one step and have it begun; apply its result, or with a delay the result of the step before.

        Whatever the executor raises comes out of here; nothing is committed then, so that the caller
        may step again, or abort what it will not wait for. But where the device's memory does not suffice,
        the largest request of the step ends with an error, and the caller steps again.
        """
        try:
            return self._step()
        except BaseException:
            self._forget_plan()
            raise

    def stepping(self) -> AbstractContextManager[None]:
        """See `EngineClient`."""
        return self._parts.executor.as_in_a_step()

    def _step(self) -> StepOutput:
        output = StepOutput()
        is_begun = len(self._flights) <= self._delay and self._begin(output)
        if len(self._flights) <= (self._delay if is_begun else 0):
            assert is_begun or output.finished or not self._requests, (
                "as long as there are requests one of them can run"
            )
            return output
        flight = self._flights[0]
        try:
            result = self._result(flight)
        except StepError as error:
            self._forget_plan()
            self._fail(flight.plan, error, output)
            return output
        self._flights.popleft()
        times = result.times
        times.schedule = flight.plan_seconds
        start = self._clock()
        try:
            applied = self.apply(flight.plan, result)
        except BaseException:
            self._void_flights()
            raise
        times.commit = self._clock() - start
        self.stats.times.add(times)
        if self._log.is_due:
            self._log.write(self.stats, self.state)
        applied.deltas += output.deltas
        applied.finished += output.finished
        return applied

    def _begin(self, output: StepOutput) -> bool:
        """Plan a step and have it executed; False where there is nothing to plan, or no memory to compute it."""
        plan = self.plan()
        if not plan.sequences:
            return False
        plan_seconds = self._clock() - plan.time
        try:
            pending = self._parts.executor.execute(plan)
        except StepError as error:
            self._forget_plan()
            self._fail(plan, error, output)
            return False
        self._flights.append(_Flight(plan, pending, plan_seconds))
        self._num_executed += 1
        for spec in plan.new:
            self._generations[spec.seq_id].is_known = True
        return True

    def _result(self, flight: _Flight) -> StepResult:
        """Wait for the result of the oldest flight; where it fails those after it are void too, and are planned anew."""
        try:
            return flight.pending.result()
        except Exception:
            self._void_flights()
            raise

    def _void_flights(self) -> None:
        """Forget steps that build on one whose result is not applied, so that their rows are planned again."""
        self._num_executed -= len(self._flights)
        self._flights.clear()

    def plan(self) -> StepPlan:
        """Decide the next step from integers alone: who computes which rows, and how much is drafted after them.

        KV places are reserved, and the plan counts as in flight until its result is applied. A plan without
        sequences is not to be executed.
        """
        start = self._clock()
        scheduler, control = self._parts.scheduler, self._parts.control
        chosen = scheduler.schedule(control)
        batch_size, block_size = len(scheduler.running), self._parts.block_size
        sequences: list[PlannedSequence] = []
        tails: list[Sequence[int]] = []
        drafts: list[Draft] = []
        new: list[SequenceSpec] = []
        is_pending = False
        draft_limit, min_survival = control.draft_limit(batch_size), control.min_survival
        for generation, planned in chosen:
            sequences.append(planned)
            if planned.is_pending:
                is_pending = True
                tails.append((UNKNOWN_TOKEN,))
                drafts.append(unknown_draft(planned.num_draft))
            else:
                tails.append(generation.tokens_between(planned.start, planned.start + planned.num_tail))
                drafts.append(generation.draft.first(planned.num_draft) if planned.num_draft else NO_DRAFT)
            if planned.reaches_end:
                has_prediction = bool(generation.spec.prediction_ids)
                limit = control.limit_of(
                    generation.stats, draft_limit, verifying=drafts[-1], has_prediction=has_prediction
                )
                generation.draft_limit = generation.draft_limit_within(limit)
                planned.draft_limit, planned.min_survival = generation.draft_limit, min_survival
                if generation.spec.sampling.constraint is not None and not self._delay:
                    # one step late nobody would know at plan time whether a token was forced
                    planned.forced_limit = generation.draft_limit_within(control.limit_of_forced(draft_limit))
            if not generation.is_known:
                new.append(generation.spec)
        rows = lay_out(sequences, tails, drafts, block_size=block_size)
        return StepPlan(
            sequences=sequences,
            rows=rows,
            block_size=block_size,
            number=self._num_executed + 1,
            time=start,
            new=new,
            is_pending=is_pending,
        )

    def apply(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Commit what a step found, at once or one step late: tokens, text, KV, finished requests, statistics."""
        output, now = StepOutput(), self._clock()
        verified: list[tuple[Draft, tuple[int, ...]]] = []
        late: list[LateDraft] = []
        num_context_tokens = num_asked = 0
        for planned, found in zip(plan.sequences, result.sequences, strict=True):
            num_context_tokens += planned.start
            num_asked += planned.draft_limit > 0
            generation = self._generations.get(planned.seq_id)
            if generation is None or generation.finished:  # it ended after this step was planned
                continue
            if generation.in_flight is planned:
                generation.in_flight = None
            request = self._requests[generation.request_id]
            metrics = request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = plan.time
            if metrics.first_token_time is None and found.is_decided:
                metrics.first_token_time = now
            draft, limit = generation.draft, generation.asked_limit
            done = self._apply_to(generation, planned, found, request, output)
            if done is not None and planned.is_pending:
                verified.append((unknown_draft(planned.num_draft), done.accepted))
                late.append(LateDraft(draft, limit, done.token_ids))
            elif done is not None:
                verified.append((done.draft, done.accepted))
        for request_id in dict.fromkeys([given.request_id for given in output.deltas if given.finish_reason]):
            self._conclude(self._requests[request_id], output)
        self._parts.control.observe(
            StepRecord(
                num_rows=len(plan.rows.token_ids),
                num_context_tokens=num_context_tokens,
                num_asked=num_asked,
                verified=verified,
                times=result.times,
                late=late,
            )
        )
        self._num_failed_drafts = result.num_failed_drafts
        self.stats.num_failed_drafts = self._num_failed_drafts - self._num_earlier_failures
        return output

    def _apply_to(
        self,
        generation: Generation,
        planned: PlannedSequence,
        found: SequenceResult,
        request: Request,
        output: StepOutput,
    ) -> Committed | None:
        """Commit one sequence's part of a step."""
        if planned.start < len(generation.spec.prompt_ids):
            self._count_prompt(generation, planned)
        if planned.num_prompt_logits:
            self._note_prompt_logprobs(request, planned, found)
        done = commit(generation, planned, found, token_text=self._parts.processor.token_text)
        if not found.is_decided:
            return done
        if request.held:
            self._parts.scheduler.enqueue_first(request.held)
            request.held = []
        if done is not None:
            self.stats.num_generation_tokens += len(done.token_ids)
            self.stats.speculation.record(done.draft, done.accepted)
        prompt_logprobs, request.prompt_logprobs_to_send = request.prompt_logprobs_to_send, None
        output.deltas.append(delta(generation, done, prompt_logprobs=prompt_logprobs))
        if generation.finish_reason is not None:
            self._retire(generation)
        return done

    def _forget_plan(self) -> None:
        """After a step that failed: nothing is in flight but steps that are still to be applied."""
        before = {planned.seq_id: planned for flight in self._flights for planned in flight.plan.sequences}
        for seq_id, generation in self._generations.items():
            generation.in_flight = before.get(seq_id)

    def _fail(self, plan: StepPlan, error: StepError, output: StepOutput) -> None:
        """End the request of a plan that did not fit with the most rows, of as many that with the longest context."""
        running = [
            (planned, generation)
            for planned in plan.sequences
            if (generation := self._generations.get(planned.seq_id)) is not None and not generation.finished
        ]
        if not running:
            return  # those that filled the step have ended meanwhile
        _, generation = max(running, key=lambda one: (one[0].num_tail + one[0].num_draft, one[0].start))
        logger.warning("request %s ends, as its step did not fit: %s", generation.request_id, error)
        generation.finish("error", str(error))
        generation.error_kind = error.kind
        output.deltas.append(delta(generation, None))
        self._retire(generation)
        self._conclude(self._requests[generation.request_id], output)

    def _conclude(self, request: Request, output: StepOutput) -> None:
        """Hand out a request that has ended; an error in one completion ends the others with it."""
        failed = next((g for g in request.generations if g.finish_reason == "error"), None)
        if failed is not None:
            request.error, request.error_kind = str(failed.stop_reason), failed.error_kind
            others = [generation for generation in request.generations if not generation.finished]
            output.finished.append(self._end(request, "error", request.error))
            output.deltas += [delta(generation, None) for generation in others]
        elif request.finished:
            output.finished.append(self._end(request, "stop"))

    def _end(self, request: Request, reason: str, stop_reason: str | None = None) -> RequestOutput:
        """Take a request out of the engine; generations still running end with `reason`."""
        for generation in request.generations:
            generation.finish(reason, stop_reason)
            self._retire(generation)
        del self._requests[request.request_id]
        for generation in request.generations:
            self._generations.pop(generation.spec.seq_id, None)
        request.metrics.finished_time = self._clock()
        for generation in request.generations:
            why = generation.finish_reason or reason
            self.stats.num_finished[why] = self.stats.num_finished.get(why, 0) + 1
        return request.output()

    def _retire(self, generation: Generation) -> None:
        """Free what a finished generation holds, here and at the executor; doing so again changes nothing."""
        path = generation.hidden_states_path if generation.finish_reason in SAVED else None
        ended = EndedSequence(
            seq_id=generation.spec.seq_id,
            num_output_tokens=len(generation.output_ids),
            hidden_states_path=path,
            blocks=None if path is None else generation.table.block_ids.copy(),
        )
        self._parts.scheduler.remove(generation)
        self._parts.executor.release([ended])

    def _note_prompt_logprobs(self, request: Request, planned: PlannedSequence, found: SequenceResult) -> None:
        """Fill in the logprobs of the prompt tokens that this step's rows predict."""
        assert request.prompt_logprobs is not None, "the request has a place for them"
        assert found.prompt_logprobs is not None, "the executor computes what was planned"
        first = planned.start + 1
        token_ids = request.prompt_ids[first : first + planned.num_prompt_logits]
        request.prompt_logprobs[first : first + planned.num_prompt_logits] = describe_logprobs(
            found.prompt_logprobs, token_ids, token_text=self._parts.processor.token_text
        )

    def _count_prompt(self, generation: Generation, planned: PlannedSequence) -> None:
        """Count the prompt tokens that a step computed for the first time."""
        start, num_prompt = planned.start, len(generation.spec.prompt_ids)
        end = min(start + planned.num_tail, num_prompt)
        self.stats.num_prompt_tokens += max(0, end - max(start, generation.num_counted_prompt_tokens))
        generation.num_counted_prompt_tokens = max(generation.num_counted_prompt_tokens, end)
