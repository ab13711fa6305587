"""Which sequences compute how many rows in the next step, within the token budget and the KV memory."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.step import PlannedSequence, unknown_draft
from forerun.engine.generation import Generation
from forerun.engine.speculation import SpeculationControl
from forerun.kv.block_pool import BlockPool

PROMPT_LOGPROB_ROWS = 256
"""Rows with logits of prompt tokens in one step; where they are used up each prompt that wants some gets one, so that it goes on."""

Chosen = tuple[Generation, PlannedSequence]
"""A sequence that computes something in the next step, and its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The most sequences that run at once and the most rows (tokens) in one forward pass."""

    max_num_seqs: int
    max_num_batched_tokens: int


class WaitingQueue:
    """Waiting completions, the client's requests taking turns.

    Within a request (`Generation.group`) completions keep their order. A request that comes in goes to
    the end of the round, and one that gets a turn goes there too: so a request of a thousand
    completions keeps nobody waiting for more than one of them.
    """

    def __init__(self) -> None:
        self._groups: OrderedDict[str, deque[Generation]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[Generation]:
        for group in self._groups.values():
            yield from group

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    @property
    def num_groups(self) -> int:
        """Requests with a completion that waits."""
        return len(self._groups)

    def next_in_turn(self, places: Mapping[str, int], share: int) -> Generation:
        """The completion that starts next: of the first request in the round that has less than its share.

        Where all hold as much, the first in the round. Something must wait.
        """
        below = (waiting[0] for group, waiting in self._groups.items() if places.get(group, 0) < share)
        return next(below, None) or next(iter(self._groups.values()))[0]

    def append(self, generation: Generation) -> None:
        """Put a completion behind those of its request."""
        self._groups.setdefault(generation.group, deque()).append(generation)

    def put_back(self, generation: Generation) -> None:
        """Put a completion before the others of its request; the request keeps its turn, or gets the last one."""
        self._groups.setdefault(generation.group, deque()).appendleft(generation)

    def put_first(self, generations: Iterable[Generation]) -> None:
        """Put completions of one request before all others, in order."""
        for generation in reversed(list(generations)):
            self._groups.setdefault(generation.group, deque()).appendleft(generation)
            self._groups.move_to_end(generation.group, last=False)

    def take(self, generation: Generation) -> None:
        """Take out a completion that is the first of its request, whose next turn is after all others'."""
        generations = self._groups[generation.group]
        generations.popleft()
        if generations:
            self._groups.move_to_end(generation.group)
        else:
            del self._groups[generation.group]

    def remove(self, generation: Generation) -> bool:
        """Take a completion out wherever it stands; False if it does not wait."""
        generations = self._groups.get(generation.group)
        if generations is None or generation not in generations:
            return False
        generations.remove(generation)
        if not generations:
            del self._groups[generation.group]
        return True


class Scheduler:
    """Running sequences before waiting ones, waiting requests in turn, drafts with what is left.

    A sequence waits, runs, and may be preempted (its KV given up, its tokens kept) back to the
    front of the queue. Between steps a running sequence holds exactly the blocks of its computed
    tokens. Where more than fits wants to run, each request has a share of the places: one that has
    more gives one up, by preemption, for one that has less.
    """

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, *, block_size: int) -> None:
        self.waiting = WaitingQueue()
        self.running: list[Generation] = []
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # prompt tokens looked up in the prefix cache
        self.num_cached_tokens = 0  # of these, found
        self._pool = pool
        self._limits = limits
        self._block_size = block_size

    def enqueue(self, generation: Generation) -> None:
        """Put a new sequence at the end of the queue."""
        self.waiting.append(generation)

    def enqueue_first(self, generations: Iterable[Generation]) -> None:
        """Put sequences at the front of the queue, in order (siblings of a sequence that runs)."""
        self.waiting.put_first(generations)

    def remove(self, generation: Generation) -> None:
        """Take a finished or aborted sequence out and free its KV; doing so again changes nothing.

        A step in flight may still write there. It ends before any step that others get these blocks for.
        """
        if generation in self.running:
            self.running.remove(generation)
        else:
            self.waiting.remove(generation)
        generation.table.free()
        generation.in_flight = None

    def schedule(self, control: SpeculationControl) -> list[Chosen]:
        """Choose the rows of the next step and reserve their KV places; `control` says how much of the drafts it verifies.

        Committed tokens come first, for the running sequences and then for newly admitted ones;
        drafts get what budget and memory remain. So when memory is tight drafts shrink to nothing
        before any sequence is preempted.
        """
        if self.waiting:
            self._make_room_for_a_share()
        num_preemptions = self.num_preemptions
        chosen, budget = self._schedule_running()
        if self.waiting and self.num_preemptions == num_preemptions:
            budget = self._admit(chosen, budget)
        if budget > 0 and control.num_speculative_tokens:
            self._add_drafts(chosen, budget, control)
        for generation, planned in chosen:
            generation.in_flight = planned
            planned.blocks = generation.table.block_ids.copy()
        return chosen

    def _schedule_running(self) -> tuple[list[Chosen], int]:
        """Rows for the committed tokens of running sequences; the youngest are preempted where memory is short."""
        chosen: list[Chosen] = []
        budget = self._limits.max_num_batched_tokens
        at = 0
        while at < len(self.running) and budget > 0:
            generation = self.running[at]
            planned = _next_rows(generation, budget, chosen)
            if planned is None:  # a step in flight writes its last token
                at += 1
                continue
            if not self._reserve(generation, planned):
                youngest = self.running[-1]  # it gives way, possibly this one itself
                if not _may_give_up_its_kv(youngest):
                    break
                self._preempt(youngest)
                continue
            chosen.append((generation, planned))
            budget -= planned.num_tail
            at += 1
        return chosen, budget

    def _reserve(self, generation: Generation, planned: PlannedSequence) -> bool:
        return generation.table.allocate(planned.end - generation.table.num_computed)

    def _admit(self, chosen: list[Chosen], budget: int) -> int:
        """Start waiting sequences while there is budget, a place, and memory for all their tokens; what budget is left."""
        places = self._places()
        while self.waiting and budget > 0 and len(self.running) < self._limits.max_num_seqs:
            generation = self.waiting.next_in_turn(places, self._share(places))
            if generation.in_flight is not None or not self._fits(generation):
                break
            planned = _next_rows(generation, budget, chosen)
            assert planned is not None, "nothing of a waiting sequence is in flight"
            reserved = self._reserve(generation, planned)
            assert reserved, "a sequence that fits as a whole must get its first rows"
            self.waiting.take(generation)
            places[generation.group] += 1
            self.running.append(generation)
            chosen.append((generation, planned))
            budget -= planned.num_tail
        return budget

    def _fits(self, generation: Generation) -> bool:
        """Claim cached blocks and check that the rest of the sequence fits, with room to spare.

        One free block per running sequence is kept back, so that admitting one does not mean
        preempting another in the next step. The sequence's digests are kept, so that looking again in
        the next step hashes nothing: what it waits for may be cached by then.
        """
        table = generation.table
        if not generation.wants_prompt_logits:
            if generation.prefix_digests is None:
                generation.prefix_digests = table.prefix_digests(generation.tokens_between(0, generation.num_tokens))
            table.match(generation.prefix_digests)
        num_needed = -(-generation.num_tokens // self._block_size) - table.num_blocks
        if num_needed + len(self.running) > self._pool.num_free:
            table.free()
            return False
        generation.prefix_digests = None
        self._count_cached(generation)
        return True

    def _count_cached(self, generation: Generation) -> None:
        """Count what the prefix cache gave a sequence; its own blocks, found again after preemption, are no hit."""
        if generation.num_cached_tokens is not None:
            return
        generation.num_cached_tokens = generation.table.num_computed
        if not generation.wants_prompt_logits:
            self.num_queried_tokens += generation.num_tokens
            self.num_cached_tokens += generation.num_cached_tokens

    def _places(self) -> Counter[str]:
        """How many places each request has."""
        return Counter(generation.group for generation in self.running)

    def _share(self, places: Mapping[str, int]) -> int:
        """The places of one request: all places over the requests that run or wait, at least one."""
        num_groups = self.waiting.num_groups + sum(group not in self.waiting for group in places)
        return max(1, self._limits.max_num_seqs // num_groups)

    def _make_room_for_a_share(self) -> None:
        """Where all places are taken and a waiting request has less than its share, preempt one of the request with the most.

        What that has computed stays in the prefix cache.
        """
        if len(self.running) < self._limits.max_num_seqs:
            return
        places = self._places()
        share = self._share(places)
        largest, most = places.most_common(1)[0]
        newcomer = self.waiting.next_in_turn(places, share)
        if most <= share or places[newcomer.group] >= share:
            return
        youngest = next(generation for generation in reversed(self.running) if generation.group == largest)
        num_free = self._pool.num_free + youngest.table.num_exclusive_blocks
        num_needed = -(-newcomer.num_tokens // self._block_size) + len(self.running)
        if num_needed <= num_free and _may_give_up_its_kv(youngest):
            self._give_up(youngest)
            self.waiting.put_back(youngest)

    def _preempt(self, generation: Generation) -> None:
        """Give up the KV of the youngest running sequence; it will be computed again."""
        assert len(self.running) > 1, "a sequence that runs alone always fits: the engine checked it at start"
        self._give_up(generation)
        self.waiting.put_first([generation])

    def _give_up(self, generation: Generation) -> None:
        """Take a sequence out of the running ones, and free its KV."""
        self.running.remove(generation)
        generation.table.free()
        self.num_preemptions += 1

    def _add_drafts(self, chosen: list[Chosen], budget: int, control: SpeculationControl) -> None:
        """Give each sequence at its end as much of its draft as `control`, budget and memory allow."""
        drafts = [_draft(generation, planned) for generation, planned in chosen]
        if not any(draft.token_ids for draft in drafts):
            return
        lengths = control.choose(
            drafts,
            num_rows=sum([planned.num_tail for _, planned in chosen]),
            num_sequences=len(chosen),
            num_context_tokens=sum([planned.start for _, planned in chosen]),
        )
        for (generation, planned), num_draft in zip(chosen, _cut_to(lengths, budget), strict=True):
            if not num_draft:
                continue
            first = planned.end
            while num_draft:
                planned.end = first + num_draft
                if self._reserve(generation, planned):
                    break
                num_draft -= 1
            else:
                planned.end = first
            planned.num_draft = num_draft


def _cut_to(lengths: Sequence[int], most: int) -> Sequence[int]:
    """Drafts' lengths, of which the longest are cut until all have `most` nodes together: the last nodes stand least likely."""
    if sum(lengths) <= most:
        return lengths
    height = max(lengths)
    while (num_nodes := sum([min(length, height) for length in lengths])) > most:
        height -= 1
    cut, num_left = [], most - num_nodes
    for length in lengths:
        one_more = length > height and num_left > 0
        num_left -= one_more
        cut.append(min(length, height) + one_more)
    return cut


def _may_give_up_its_kv(generation: Generation) -> bool:
    """Whether a sequence may be preempted: not if the step in flight may end it and its hidden states are to be saved."""
    return generation.in_flight is None or generation.hidden_states_path is None


def _draft(generation: Generation, planned: PlannedSequence) -> Draft:
    """What may be verified of a sequence; where only the executor has it, as much as it may be."""
    if not planned.reaches_end:
        return NO_DRAFT
    if planned.is_pending:
        return unknown_draft(generation.draft_limit)
    return generation.draft


def _next_rows(generation: Generation, budget: int, chosen: Iterable[Chosen]) -> PlannedSequence | None:
    """The rows that a sequence can use now, drafts aside; None where a step in flight surely writes its last token.

    `chosen` sequences have rows already, and share the rows with logits of prompt tokens with this one.
    Of a sequence that is in flight with its newest token the next row is that token, whatever it is, at the
    first place where it may be; places are reserved up to the last one.
    """
    seq_id, before = generation.spec.seq_id, generation.in_flight
    start = generation.table.num_computed
    if before is not None:
        start += before.num_tail
        if before.reaches_end:
            max_length = generation.spec.max_length
            if generation.num_tokens + 1 >= max_length:
                return None
            return PlannedSequence(
                seq_id=seq_id,
                start=start,
                num_tail=1,
                reaches_end=True,
                is_pending=True,
                end=min(start + before.num_draft + 1, max_length),
            )
    num_tokens = generation.num_tokens
    if num_tokens - start == 1 and generation.output_ids:  # decoding, the most frequent case
        return PlannedSequence(seq_id=seq_id, start=start, num_tail=1, reaches_end=True, end=num_tokens)
    num_rows = min(num_tokens - start, budget)
    num_prompt_logits = 0
    if generation.wants_prompt_logits:
        num_taken = sum(planned.num_prompt_logits for _, planned in chosen)
        num_rows = min(num_rows, max(1, PROMPT_LOGPROB_ROWS - num_taken))
        num_prompt_logits = max(0, min(start + num_rows, len(generation.spec.prompt_ids) - 1) - start)
    end = start + num_rows
    return PlannedSequence(
        seq_id=seq_id,
        start=start,
        num_tail=num_rows,
        reaches_end=end == num_tokens,
        num_prompt_logits=num_prompt_logits,
        end=end,
    )
