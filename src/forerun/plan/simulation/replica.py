"""One engine among several in the same virtual time: its requests, and what they see."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from forerun.core.outputs import RequestOutput
from forerun.core.sampling_params import SamplingParams
from forerun.engine.client import EngineRequest
from forerun.engine.simulation import DecodeStretch, SimulationSettings, simulated_engine
from forerun.engine.speculation import SpeculationControl
from forerun.executor.simulated import VirtualClock
from forerun.kv.prefix_cache import block_digests, root_digest
from forerun.plan.simulation.records import GapLog, RequestRecord, StepLog


class Sent(NamedTuple):
    """A request as a replica gets it."""

    record: RequestRecord
    prompt_ids: list[int]
    max_tokens: int
    seed: int


class Ended(NamedTuple):
    """A request that a replica is done with, and the tokens that it wrote."""

    sent: Sent
    token_ids: list[int]


class Replica:
    """An engine with its own clock, which goes on when it steps, or is set to a request's arrival when it was idle.

    Args:
        number: among the replicas of its kind.
        settings: the engine's.
        control: how much it drafts; its own, where it learns.
        keeps_chunks: whether records keep the time of each chunk.
        looks_ahead: whether steps that only decode are taken together; then its caches are behind its time.
    """

    def __init__(
        self,
        number: int,
        settings: SimulationSettings,
        control: SpeculationControl,
        *,
        keeps_chunks: bool,
        looks_ahead: bool,
    ) -> None:
        self.number = number
        self.clock = VirtualClock()
        self.engine = simulated_engine(settings, control, clock=self.clock)
        self.steps = StepLog()
        self.gaps = GapLog()
        self._settings = settings
        self._keeps_chunks = keeps_chunks
        self._sent: dict[str, Sent] = {}  # by request id
        self._looks_ahead = looks_ahead
        self._stretch: DecodeStretch | None = None  # the steps that come next, where they only decode
        self._arriving: deque[Sent] = deque()  # with their KV, which waits for memory

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.engine.has_work or bool(self._arriving)

    @property
    def next_event(self) -> float:
        """When its next step begins of which it is not known what it does."""
        return self.clock.now if self._stretch is None else self._stretch.end

    def submit(self, sent: Sent, at: float) -> None:
        """Queue a request that arrives `at` a time; a replica in the middle of a step takes it up after that."""
        self._go_on(at)
        self._submit(sent)

    def submit_with_kv(self, sent: Sent, at: float) -> None:
        """Queue a request whose prompt's KV arrives with it, to be taken up as soon as there is memory and a place for it."""
        self._go_on(at)
        self._arriving.append(sent)

    def _go_on(self, until: float) -> None:
        """Take the steps that begin before a time, and forget what was known of the ones after it."""
        if self._stretch is not None:
            self._take(bisect_left(self._stretch.starts, until))
        self.clock.now = max(self.clock.now, until)

    def _take(self, num_steps: int) -> list[Ended]:
        """Take the first steps of those that only decode, and forget the others; the requests that they ended."""
        stretch, self._stretch = self._stretch, None
        if stretch is None or not num_steps:
            return []
        scheduler = self.engine.parts.scheduler
        records = [self._sent[one.request_id].record for one in scheduler.running]
        held, finished = self.engine.take(stretch, num_steps)
        since: dict[float, int] = {}
        for record in records:
            since[record.last_chunk] = since.get(record.last_chunk, 0) + 1
        num_waiting = self.num_waiting
        for start, end, num_tokens, num_held in zip(
            stretch.starts, stretch.ends, stretch.num_tokens, held, strict=False
        ):
            for last, count in since.items():
                self.gaps.add(end - last, count)
            since = {end: len(records)}
            self.steps.add(
                end=end,
                seconds=end - start,
                num_running=len(records),
                num_waiting=num_waiting,
                num_chunks=len(records),
                num_tokens=num_tokens,
                num_used_blocks=num_held,
            )
        for record, ahead in zip(records, stretch.sequences, strict=True):
            lengths = ahead.lengths
            record.num_draft_tokens += sum(ahead.num_drafted[:num_steps])
            record.num_accepted_tokens += lengths[num_steps] - lengths[0] - num_steps
            record.num_chunks += num_steps
            record.last_chunk = self.clock.now
            if record.chunks is not None:
                tokens = [after - before for before, after in pairwise(lengths[: num_steps + 1])]
                record.chunks += zip(stretch.ends, tokens, strict=False)
        return [self._end(one) for one in finished]

    def step(self) -> list[Ended]:
        """Take the steps that only decode, and the one after them if they end nobody; the requests that ended."""
        ended: list[Ended] = []
        if self._stretch is not None:
            ended = self._take(len(self._stretch.starts))
            self._look_ahead()
        if self._stretch is None and not ended:
            ended = self._take_any_step()
            self._look_ahead()
        return ended

    def _look_ahead(self) -> None:
        if self._looks_ahead and not self._arriving:
            self._stretch = self.engine.look_ahead()

    def _take_any_step(self) -> list[Ended]:
        """Take one step, whatever it does; the requests that it ended."""
        while self._arriving and self._take_kv(self._arriving[0]):
            self._submit(self._arriving.popleft())
        start = self.clock.now
        output = self.engine.step()
        now = self.clock.now
        since: dict[float, int] = {}
        for delta in output.deltas:
            record = self._sent[delta.request_id].record
            record.num_draft_tokens += delta.num_draft_tokens
            record.num_accepted_tokens += delta.num_accepted_tokens
            if not record.num_chunks:
                record.first_token = now
            else:
                last = record.last_chunk
                since[last] = since.get(last, 0) + 1
            record.num_chunks += 1
            record.last_chunk = now
            if record.chunks is not None:
                record.chunks.append((now, len(delta.token_ids)))
        for last, count in since.items():
            self.gaps.add(now - last, count)
        num_running = len(self.engine.parts.scheduler.running) + len(output.finished)
        self.steps.add(
            end=now,
            seconds=now - start,
            num_running=num_running,
            num_waiting=self.num_waiting,
            num_chunks=len(output.deltas),
            num_tokens=sum([len(delta.token_ids) for delta in output.deltas]),
            num_used_blocks=self.engine.num_held_blocks,
        )
        return [self._end(one) for one in output.finished]

    def _end(self, finished: RequestOutput) -> Ended:
        """Note that a request ended with the step that was just taken."""
        sent = self._sent.pop(finished.request_id)
        record = sent.record
        assert finished.metrics is not None, "the engine times every request"
        assert finished.metrics.first_scheduled_time is not None, "it ran to its end"
        if math.isnan(record.started):  # else the replica that read the prompt has set it
            record.started = finished.metrics.first_scheduled_time
            record.num_cached_tokens = finished.num_cached_tokens or 0
        record.finished = self.clock.now
        return Ended(sent, finished.outputs[0].token_ids)

    @property
    def num_waiting(self) -> int:
        """Requests that have no place yet."""
        return len(self.engine.parts.scheduler.waiting) + len(self._arriving)

    def num_cached_tokens(self, digests: Sequence[bytes]) -> int:
        """How many tokens of a prompt with these block digests are in the prefix cache."""
        pool, count = self.engine.parts.pool, 0
        for digest in digests:
            if pool.find(digest) is None:
                break
            count += 1
        return count * self._settings.block_size

    def _submit(self, sent: Sent) -> None:
        record = sent.record
        record.replica = self.number
        if self._keeps_chunks and record.chunks is None:
            record.chunks = []
        request_id = str(record.number)
        sampling = SamplingParams(max_tokens=sent.max_tokens, ignore_eos=True, detokenize=False, seed=sent.seed)
        self._sent[request_id] = sent
        self.engine.accept(EngineRequest(request_id=request_id, prompt_ids=sent.prompt_ids, sampling=sampling))
        self.engine.submit(request_id)

    def _take_kv(self, sent: Sent) -> bool:
        """Put the KV of a prompt's full blocks into the prefix cache, where the scheduler will find it; False: no place yet."""
        parts, settings = self.engine.parts, self._settings
        pool, scheduler = parts.pool, parts.scheduler
        if len(scheduler.running) + len(scheduler.waiting) >= settings.max_num_seqs:
            return False
        # those before it wait with their KV in the cache alone, from which it must not be taken
        lengths = [len(sent.prompt_ids), *(one.num_tokens for one in scheduler.waiting)]
        num_needed = sum(-(-length // settings.block_size) for length in lengths)
        if num_needed + len(scheduler.running) + len(scheduler.waiting) > pool.num_free:
            return False
        found, missing = [], []
        for digest in prompt_digests(sent.prompt_ids, settings.block_size):
            block = pool.find(digest)
            if block is None:
                missing.append(digest)
            else:
                pool.share(block)  # so that it is not evicted for the others
                found.append(block)
        blocks = pool.take(len(missing))
        assert blocks is not None, "there is room for the whole prompt"
        for block, digest in zip(blocks, missing, strict=True):
            pool.register(block, digest)
        pool.give_back((found + blocks)[::-1])
        return True


def prompt_digests(prompt_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The digests under which the prefix cache knows a prompt's full blocks, its last token left out."""
    return list(block_digests(root_digest(None), prompt_ids[:-1], block_size=block_size))
