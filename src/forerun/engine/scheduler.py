"""Which sequences compute how many rows in the next step, within the token budget and the KV memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from forerun.engine.generation import Generation, Work
from forerun.kv.block_pool import BlockPool

PROMPT_LOGPROB_ROWS = 256  # rows per step of a request that wants logits at every prompt token
NEVER_REFUSED = (-1, -1)  # seq_id of the sequence that did not fit last, and the room (blocks) there was


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The most sequences that run at once and the most rows (tokens) in one forward pass."""

    max_num_seqs: int
    max_num_batched_tokens: int


class Scheduler:
    """First come, first served; running sequences before waiting ones; drafts with what is left.

    A sequence waits, runs, and may be preempted (its KV given up, its tokens kept) back to the
    front of the queue. Between steps a running sequence holds exactly the blocks of its computed
    tokens.
    """

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, *, block_size: int) -> None:
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # prompt tokens looked up in the prefix cache
        self.num_cached_tokens = 0  # of these, found
        self._pool = pool
        self._limits = limits
        self._block_size = block_size
        self._refused = NEVER_REFUSED

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def enqueue(self, generation: Generation) -> None:
        """Put a new sequence at the end of the queue."""
        self.waiting.append(generation)

    def enqueue_first(self, generations: Iterable[Generation]) -> None:
        """Put sequences at the front of the queue, in order (siblings of a sequence that runs)."""
        self.waiting.extendleft(reversed(list(generations)))

    def remove(self, generation: Generation) -> None:
        """Take a finished or aborted sequence out and free its KV."""
        if generation in self.running:
            self.running.remove(generation)
        elif generation in self.waiting:
            self.waiting.remove(generation)
        generation.slot.free()

    def schedule(self) -> list[Work]:
        """Choose the rows of the next step and reserve their KV places.

        Committed tokens come first, for the running sequences and then for newly admitted ones;
        drafts get what budget and memory remain. So when memory is tight drafts shrink to nothing
        before any sequence is preempted.
        """
        num_preemptions = self.num_preemptions
        works = self._schedule_running()
        if self.waiting and self.num_preemptions == num_preemptions:
            works += self._admit(self._budget_after(works))
        if any(work.generation.draft.token_ids for work in works):
            self._add_drafts(works, self._budget_after(works))
        return works

    def _budget_after(self, works: Iterable[Work]) -> int:
        return self._limits.max_num_batched_tokens - sum(work.num_tail for work in works)

    def _schedule_running(self) -> list[Work]:
        """Rows for the committed tokens of running sequences; the youngest are preempted where memory is short."""
        works: list[Work] = []
        budget = self._limits.max_num_batched_tokens
        at = 0
        while at < len(self.running) and budget > 0:
            generation = self.running[at]
            slot = generation.slot
            num_rows = min(_wanted_rows(generation), budget)
            if not slot.allocate(num_rows):
                self._preempt(self.running[-1])  # the youngest gives way, possibly this one itself
                continue
            works.append(Work(generation, slot.num_computed, num_rows))
            budget -= num_rows
            at += 1
        return works

    def _admit(self, budget: int) -> list[Work]:
        """Start waiting sequences while there is budget, a place, and memory for all their tokens."""
        works: list[Work] = []
        while self.waiting and budget > 0 and len(self.running) < self._limits.max_num_seqs:
            generation = self.waiting[0]
            if not self._fits(generation):
                break
            num_rows = min(_wanted_rows(generation), budget)
            reserved = generation.slot.allocate(num_rows)
            assert reserved, "a sequence that fits as a whole must get its first rows"
            self.waiting.popleft()
            self.running.append(generation)
            works.append(Work(generation, generation.slot.num_computed, num_rows))
            budget -= num_rows
        return works

    def _fits(self, generation: Generation) -> bool:
        """Claim cached blocks and check that the rest of the sequence fits, with room to spare.

        One free block per running sequence is kept back, so that admitting one does not mean
        preempting another in the next step. Matching hashes the whole sequence, so one that did not
        fit is looked at again only when there is more room.
        """
        slot, sequence = generation.slot, generation.sequence
        room = self._pool.num_free - len(self.running)
        refused_id, refused_room = self._refused
        if sequence.seq_id == refused_id and room <= refused_room:
            return False
        if not generation.wants_prompt_logits:
            slot.match(sequence.tokens_from(0))
        num_needed = -(-len(sequence) // self._block_size) - slot.num_blocks
        if num_needed + len(self.running) > self._pool.num_free:
            slot.free()
            self._refused = (sequence.seq_id, room)
            return False
        self._refused = NEVER_REFUSED
        self._count_cached(generation)
        return True

    def _count_cached(self, generation: Generation) -> None:
        """Count what the prefix cache gave a sequence; its own blocks, found again after preemption, are no hit."""
        if generation.num_cached_tokens is not None:
            return
        generation.num_cached_tokens = generation.slot.num_computed
        if not generation.wants_prompt_logits:
            self.num_queried_tokens += len(generation.sequence)
            self.num_cached_tokens += generation.num_cached_tokens

    def _preempt(self, generation: Generation) -> None:
        """Give up the KV of the youngest running sequence; it will be computed again."""
        assert len(self.running) > 1, "a sequence that runs alone always fits: the engine checked it at start"
        self.running.remove(generation)
        generation.slot.free()
        self.waiting.appendleft(generation)
        self.num_preemptions += 1

    def _add_drafts(self, works: list[Work], budget: int) -> None:
        """Give each sequence at its end as much of its draft as budget and memory allow."""
        for work in works:
            draft = work.generation.draft
            if not draft.token_ids or not work.reaches_end:
                continue
            num_draft = min(len(draft), budget)
            while num_draft and not work.generation.slot.allocate(work.num_tail + num_draft):
                num_draft -= 1
            if num_draft:
                work.draft = draft.first(num_draft)
                budget -= num_draft


def _wanted_rows(generation: Generation) -> int:
    """Rows a sequence can use now, drafts aside."""
    wanted = generation.num_uncomputed
    return min(wanted, PROMPT_LOGPROB_ROWS) if generation.wants_prompt_logits else wanted
