"""The loop: schedule, build, forward, verify, commit, draft."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from forerun.core.draft import NO_DRAFT
from forerun.core.metrics import Metric
from forerun.core.outputs import RequestOutput, StreamDelta
from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import StepTimes
from forerun.core.verdict import Verdict
from forerun.drafters.guard import GuardedDrafter
from forerun.engine.batcher import Batch, Batcher
from forerun.engine.commit import Committed, commit_step
from forerun.engine.generation import Generation, Work
from forerun.engine.hidden_states import HiddenStatesExporter
from forerun.engine.logprobs import describe_logprobs
from forerun.engine.request import Intake, Request
from forerun.engine.runner import Runner
from forerun.engine.scheduler import Scheduler
from forerun.engine.speculation import SpeculationControl
from forerun.engine.stats import EngineState, EngineStats, StatsLog
from forerun.errors import RequestError
from forerun.grammar.drafting import propose
from forerun.kv.block_pool import BlockPool
from forerun.verify.base import Judged, Verifier


@dataclass(slots=True)
class StepOutput:
    """What one step gave: new text per completion, and the requests that ended with it."""

    deltas: list[StreamDelta] = field(default_factory=list)
    finished: list[RequestOutput] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The engine's parts, made by `engine.build`."""

    intake: Intake
    pool: BlockPool
    scheduler: Scheduler
    batcher: Batcher
    runner: Runner
    verifier: Verifier
    drafting: GuardedDrafter
    control: SpeculationControl
    exporter: HiddenStatesExporter | None  # None: hidden states are not saved
    torch_threads: AbstractContextManager[None]  # torch's threads during a step


class Engine:
    """Runs requests to their end, a step at a time.

    Plain decoding is a draft of length zero: there is one path, whatever the drafter.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.stats = EngineStats()
        self._parts = parts
        self._requests: dict[str, Request] = {}
        self._log = StatsLog()
        self._num_earlier_failures = 0  # of the drafter, before the statistics were reset
        self._no_autograd = torch.inference_mode()  # made once: a new one for each step takes twice as long to enter

    @property
    def parts(self) -> EngineParts:
        """What the engine is made of, for measuring a part alone; leave them alone while there is work."""
        return self._parts

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def state(self) -> EngineState:
        """What waits, what runs, how full the KV memory is."""
        pool, scheduler = self._parts.pool, self._parts.scheduler
        return EngineState(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + sum(len(r.held) for r in self._requests.values()),
            kv_usage=1 - pool.num_free / pool.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_queried_tokens=scheduler.num_queried_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_speculative_tokens=self._parts.control.num_speculative_tokens,
        )

    def metrics(self) -> list[Metric]:
        """All counters and gauges, in vLLM's names where vLLM has them."""
        return self.stats.metrics(self.state)

    def reset_stats(self) -> None:
        """Count from zero again."""
        self.stats = EngineStats()
        self._log = StatsLog()
        self._num_earlier_failures = self._parts.drafting.num_failures

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        prompt: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request.

        Raises:
            RequestError: the id is in use, or the prompt or a sampling value does not fit.
        """
        self.enqueue(self.accept(request_id, prompt_ids, sampling, prompt=prompt, cache_salt=cache_salt))

    def accept(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        prompt: str | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        """Check a request and make it ready for `enqueue`; any thread may call it at any time.

        Raises:
            RequestError: the prompt or a sampling value does not fit.
        """
        return self._parts.intake.accept(request_id, prompt_ids, sampling, prompt=prompt, cache_salt=cache_salt)

    def enqueue(self, request: Request) -> None:
        """Queue a request that `accept` has made.

        Raises:
            RequestError: its id is in use.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request_id: {request.request_id!r} is running already; choose another")
        self._requests[request.request_id] = request
        self._parts.scheduler.enqueue(request.generations[0])

    def prepare(self, sampling: SamplingParams) -> None:
        """Compile what a request's text must match, so that `add_request` finds it ready.

        Another thread may call it, beside a step; a second per model and some tenths per grammar are
        then nobody's wait.

        Raises:
            RequestError: it cannot be compiled.
            ConfigError: llguidance is not installed.
        """
        if sampling.constraint is not None:
            self._parts.intake.grammars.prepare(sampling.constraint)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; return what it has given, or None if it is not running."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        return self._end(request, "abort")

    def finish_files(self, output: RequestOutput) -> None:
        """Wait until the hidden states of an ended request are in their files; any thread may.

        Where they cannot be saved its `error` says why, and the path is taken back.
        """
        exporter = self._parts.exporter
        if exporter is None:
            return
        for completion in output.outputs:
            if completion.hidden_states_path is None:
                continue
            failure = exporter.finish(completion.hidden_states_path)
            if failure is not None:
                output.error = f"hidden states: cannot write {completion.hidden_states_path} ({failure}); check the disk and shared_storage_path"
                completion.hidden_states_path = None
        if output.outputs[0].hidden_states_path is None:
            output.kv_transfer_params = None

    def step(self) -> StepOutput:
        """Compute one forward pass for as many sequences as fit, and commit what it decided.

        Whatever the forward pass or the verifier raises comes out of here; nothing is committed
        then, so that the caller may step again, or abort what it will not wait for.
        """
        with self._no_autograd, self._parts.torch_threads:
            return self._step()

    def _step(self) -> StepOutput:
        parts, clock, start = self._parts, [time.perf_counter()], time.monotonic()
        works = parts.scheduler.schedule()
        clock.append(time.perf_counter())
        if not works:
            assert not self._requests, "as long as there are requests one of them can run"
            return StepOutput()
        batch = parts.batcher.build(works)
        attend = parts.runner.prepare(batch.forward)
        clock.append(time.perf_counter())
        result = parts.runner.forward(batch.forward, attend)
        clock.append(time.perf_counter())
        verdicts = self._verify(works, batch, result.logits)
        clock.append(time.perf_counter())
        committed = commit_step(works, _decided_rows(batch.first_rows, verdicts), verdicts, parts.runner.cache)
        output = self._report(committed, batch, result.logits, start=start)
        clock.append(time.perf_counter())
        self._draft(committed)
        clock.append(time.perf_counter())
        self._count(committed, clock)
        return output

    def _verify(self, works: Sequence[Work], batch: Batch, logits: Tensor) -> list[Verdict | None]:
        """A verdict for each work that has something to judge."""
        judged = [
            Judged(
                draft=work.draft,
                first_row=row,
                rules=work.generation.rules,
                seed=work.generation.sequence.seed,
                position=len(work.generation.sequence),
                output_ids=work.generation.sequence.output_ids,
            )
            for work, row in zip(works, batch.first_rows, strict=True)
            if row >= 0
        ]
        verdicts = iter(self._parts.verifier.verify(logits, judged) if judged else ())
        return [next(verdicts) if row >= 0 else None for row in batch.first_rows]

    def _report(self, committed: Sequence[Committed], batch: Batch, logits: Tensor, *, start: float) -> StepOutput:
        """Logprobs, stream deltas and finished requests of the step begun at `start`; siblings are released here."""
        output = StepOutput()
        now = time.monotonic()
        for done, prompt_rows in zip(committed, batch.prompt_rows, strict=True):
            generation = done.work.generation
            request = self._requests[generation.request_id]
            metrics = request.metrics
            metrics.first_scheduled_time = metrics.first_scheduled_time or start
            if prompt_rows:
                self._note_prompt_logprobs(request, done.work, logits, prompt_rows)
            if done.first_row < 0:
                continue
            if request.held:
                self._parts.scheduler.enqueue_first(request.held)
                request.held = []
            if generation.sequence.sampling.logprobs is not None:
                self._note_logprobs(done, logits)
            metrics.first_token_time = metrics.first_token_time or now
            output.deltas.append(_delta(generation, done))
            if generation.finish_reason is not None:
                self._save_hidden_states(generation)
                self._retire(generation)
        for request_id in dict.fromkeys([delta.request_id for delta in output.deltas if delta.finish_reason]):
            self._conclude(self._requests[request_id], output)
        return output

    def _conclude(self, request: Request, output: StepOutput) -> None:
        """Hand out a request that has ended; an error in one completion ends the others with it."""
        failed = next((g for g in request.generations if g.finish_reason == "error"), None)
        if failed is not None:
            request.error = str(failed.stop_reason)
            others = [generation for generation in request.generations if not generation.finished]
            output.finished.append(self._end(request, "error", request.error))
            output.deltas += map(_delta, others)
        elif request.finished:
            output.finished.append(self._end(request, "stop"))

    def _end(self, request: Request, reason: str, stop_reason: str | None = None) -> RequestOutput:
        """Take a request out of the engine; generations still running end with `reason`."""
        for generation in request.generations:
            generation.finish(reason, stop_reason)
            self._retire(generation)
        del self._requests[request.request_id]
        request.metrics.finished_time = time.monotonic()
        for generation in request.generations:
            why = generation.finish_reason or reason
            self.stats.num_finished[why] = self.stats.num_finished.get(why, 0) + 1
        return request.output()

    def _save_hidden_states(self, generation: Generation) -> None:
        """Hand the features of a generation that ended by itself to the exporter, if there is one."""
        exporter = self._parts.exporter
        if exporter is not None and generation.finish_reason != "error":
            generation.hidden_states_path = exporter.save(generation, self._parts.runner.cache)

    def _retire(self, generation: Generation) -> None:
        """Free what a finished generation holds; doing so again changes nothing."""
        self._parts.scheduler.remove(generation)
        self._parts.drafting.stop(generation.sequence)

    def _note_logprobs(self, done: Committed, logits: Tensor) -> None:
        """Add the logprobs of the tokens just committed."""
        generation = done.work.generation
        wanted = generation.sequence.sampling.logprobs
        assert wanted is not None, "called only where they are wanted"
        rows = describe_logprobs(
            logits[done.logits_rows], done.token_ids, wanted, token_text=self._parts.intake.token_text
        )
        generation.logprobs += rows
        generation.cumulative_logprob += sum(row[t].logprob for row, t in zip(rows, done.token_ids, strict=True))

    def _note_prompt_logprobs(self, request: Request, work: Work, logits: Tensor, rows: range) -> None:
        """Fill in the logprobs of the prompt tokens that this step's rows predict."""
        wanted = work.generation.sequence.sampling.prompt_logprobs
        assert wanted is not None, "rows are only made when they are wanted"
        assert request.prompt_logprobs is not None, "the request has a place for them"
        first = work.start + 1
        token_ids = request.prompt_ids[first : first + len(rows)]
        request.prompt_logprobs[first : first + len(rows)] = describe_logprobs(
            logits[rows.start : rows.stop], token_ids, wanted, token_text=self._parts.intake.token_text
        )

    def _draft(self, committed: Sequence[Committed]) -> None:
        """Get the bets that the next step will verify; here the drafter first hears of a sequence.

        So it keeps nothing for those that only wait, however many they are.
        """
        drafting, running = self._parts.drafting, []
        for done in committed:
            generation = done.work.generation
            if generation.finish_reason is None:
                drafting.start(generation.sequence)
                if done.first_row >= 0:
                    generation.draft = NO_DRAFT
                    running.append(generation)
        requests = self._parts.control.requests(running, batch_size=len(self._parts.scheduler.running))
        if not requests:
            return
        by_id = {generation.sequence.seq_id: generation for generation in running}
        for request, draft in zip(
            requests, propose(drafting, requests, self._parts.runner.cache.features), strict=True
        ):
            by_id[request.sequence.seq_id].draft = draft

    def _count(self, committed: Sequence[Committed], clock: list[float]) -> None:
        """Add a step to the statistics; `clock` holds the times at the phases' borders."""
        stats = self.stats
        schedule, build, forward, verify, commit, draft = (end - start for start, end in pairwise(clock))
        stats.times.add(StepTimes(schedule, build, forward, verify, commit, draft, num_steps=1))
        for done in committed:
            work = done.work
            num_prompt = len(work.generation.sequence.prompt_ids) - work.start
            if num_prompt > 0:
                stats.num_prompt_tokens += min(num_prompt, work.num_tail)
            stats.num_generation_tokens += len(done.token_ids)
            if done.accepted is not None:
                stats.speculation.record(work.draft, done.accepted)
        stats.num_failed_drafts = self._parts.drafting.num_failures - self._num_earlier_failures
        if self._log.is_due:
            self._log.write(stats, self.state)


def _decided_rows(first_rows: Sequence[int], verdicts: Sequence[Verdict | None]) -> list[int]:
    """`first_rows`, -1 also where the verifier left a sequence undecided."""
    return [row if verdict is not None else -1 for row, verdict in zip(first_rows, verdicts, strict=True)]


def _delta(generation: Generation, done: Committed | None = None) -> StreamDelta:
    """What a step added to a generation; None: it ends without one."""
    token_ids = done.token_ids if done else []
    draft = done.work.draft if done else NO_DRAFT
    return StreamDelta(
        request_id=generation.request_id,
        index=generation.index,
        text=generation.text.take_delta(finished=generation.finished) if generation.text is not None else "",
        token_ids=token_ids,
        origins=done.origins if done else [],
        logprobs=generation.logprobs[len(generation.logprobs) - len(token_ids) :] if generation.logprobs else None,
        drafter=draft.source,
        num_draft_tokens=len(draft),
        num_accepted_tokens=len((done and done.accepted) or ()),
        finish_reason=generation.finish_reason,
        stop_reason=generation.stop_reason,
    )
