"""An engine in virtual time: real scheduling, KV accounting and statistics over an executor that computes nothing."""

from __future__ import annotations

import functools
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.outputs import Origin, RequestOutput
from forerun.core.step import UNKNOWN_TOKEN, StepPlan
from forerun.engine.client import StepOutput
from forerun.engine.commit import origins_of
from forerun.engine.engine import Engine, EngineParts
from forerun.engine.generation import Generation
from forerun.engine.request import RequestProcessor
from forerun.engine.scheduler import Scheduler, SchedulerLimits
from forerun.engine.speculation import FixedLength, SpeculationControl
from forerun.errors import ConfigError
from forerun.executor.simulated import DraftSeconds, SimulatedExecutor, StepsAhead, VirtualClock, drafting_is_free
from forerun.executor.simulated_text import Drafted, Drafting, Texts
from forerun.kv.block_pool import BlockPool

NO_SPECULATION = FixedLength(num_speculative_tokens=0)


def linear_step_seconds(plan: StepPlan) -> float:
    """4 ms, and 0.1 ms for each row: a small model on a processor."""
    return 0.004 + 0.0001 * len(plan.rows.token_ids)


def linear_decode_seconds(num_rows: int, num_sequences: int, num_context_tokens: int) -> float:  # noqa: ARG001 - it does not depend on them
    """What `linear_step_seconds` says of a step of so many rows."""
    return 0.004 + 0.0001 * num_rows


DecodeSeconds = Callable[[int, int, int], float]
"""Seconds of a step that reads no prompt: by its rows, one for each sequence and one for each node of its draft, by its
sequences, and by the tokens that they have in the KV cache before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """What is simulated, in the names of `EngineSettings` where it has the setting.

    `step_seconds` says what a step takes, drafting left out, and `draft_seconds` what that takes.
    `decode_seconds` says the same as `step_seconds` of steps in which nobody reads a prompt: where it is given, an engine
    can take such steps together, see `DecodeStretch`; drafts must then depend on the text and the place alone.
    `drafting` says what is drafted and what of it is right (None: nothing is drafted), `texts` what the
    target writes (None: tokens from a hash).

    Raises:
        ConfigError: a limit is below 1.
    """

    step_seconds: Callable[[StepPlan], float] = linear_step_seconds
    decode_seconds: DecodeSeconds | None = None
    draft_seconds: DraftSeconds = drafting_is_free
    drafting: Drafting | None = None
    texts: Texts | None = None
    vocab_size: int = 32_000
    eos_token_ids: frozenset[int] = frozenset()
    num_blocks: int = 4096
    block_size: int = 16
    max_model_len: int = 4096
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}; must be 1 or more")


MOST_STEPS = 64
"""Of a stretch: a request that arrives soon makes the rest of it void."""


@dataclass(frozen=True, slots=True)
class DecodeStretch:
    """Steps to come in which each running sequence verifies its draft and goes on, as far as nobody intervenes.

    Nobody starts, reads a prompt, or waits for memory; `ends_texts`: the last step ends somebody.
    """

    sequences: list[StepsAhead]  # those that run, in their order
    starts: list[float]  # of each step, by the engine's clock
    seconds: list[float]  # that each takes, drafting left out
    drafting: list[float]  # seconds of drafting after it
    ends: list[float]
    num_tokens: list[int]  # that each gives
    ends_texts: bool

    @property
    def end(self) -> float:
        """The end of the last step that ends nobody, or the start of one that does."""
        return self.starts[-1] if self.ends_texts else self.ends[-1]


class SimulatedEngine(Engine):
    """An engine in virtual time, which takes steps together where all that they do is known before.

    So it is where no sequence starts, reads a prompt, waits for memory or can end but by its length, and draft lengths do
    not depend on what happens: most steps of a busy engine. What it has done after them is, to the bit, what as many calls
    of `step` would have.
    """

    def __init__(self, parts: EngineParts, settings: SimulationSettings, *, delay: int, clock: VirtualClock) -> None:
        super().__init__(parts, delay=delay, clock=clock)
        assert isinstance(parts.executor, SimulatedExecutor), "only that foresees what it will write"
        self._executor = parts.executor
        self._settings = settings
        self._virtual_clock = clock
        self._num_held_blocks = 0
        self._can_look_ahead = (
            not delay and settings.decode_seconds is not None and isinstance(parts.control, FixedLength)
        )

    @property
    def num_held_blocks(self) -> int:
        """Blocks that the step planned last held while it ran, before any of them was given back."""
        return self._num_held_blocks

    def plan(self) -> StepPlan:
        """See `Engine`."""
        plan = super().plan()
        pool = self._parts.pool
        self._num_held_blocks = pool.num_blocks - pool.num_free
        return plan

    def look_ahead(self) -> DecodeStretch | None:
        """The next steps, `MOST_STEPS` at most, as far as they only decode; None where the next one may do more, or its time is not known."""
        running = self._parts.scheduler.running
        if not self._can_look_ahead or not running or not self._only_decodes(running):
            return None
        most_drafted = self._parts.control.draft_limit(len(running))
        num_steps, sequences = MOST_STEPS, []
        for one in running:
            limit = one.draft_limit_within(most_drafted)
            ahead = self._executor.look_ahead(one.spec.seq_id, num_steps, draft_limit=limit)
            num_steps = min(num_steps, len(ahead.lengths) - 1)
            sequences.append(ahead)
        num_steps = self._num_steps_in_memory(sequences, num_steps)
        stretch = self._timed(sequences, num_steps, most_drafted)
        return stretch if stretch.starts else None

    def _only_decodes(self, running: Sequence[Generation]) -> bool:
        """Whether every running sequence only goes on, and nobody who waits can start."""
        if self._parts.scheduler.waiting and len(running) < self._settings.max_num_seqs:
            return False
        if len({one.group for one in running}) < len(running):  # a share of the places might be claimed
            return False
        return all(
            one.output_ids and one.num_tokens - one.table.num_computed == 1 and not one.stop_tokens and one.text is None
            for one in running
        )

    def _num_steps_in_memory(self, sequences: Sequence[StepsAhead], num_steps: int) -> int:
        """The most steps, up to `num_steps`, for whose tokens and drafts there are free blocks."""
        num_free, block_size = self._parts.pool.num_free, self._settings.block_size
        while num_steps > 0:
            num_needed = 0
            for ahead, one in zip(sequences, self._parts.scheduler.running, strict=True):
                most = ahead.lengths[num_steps - 1] + max(ahead.num_drafted[:num_steps])
                num_needed += -(-most // block_size) - one.table.num_blocks
            if num_needed <= num_free:
                break
            num_steps //= 2
        return num_steps

    def _timed(self, sequences: list[StepsAhead], num_steps: int, most_drafted: int) -> DecodeStretch:
        """The stretch of so many steps of these sequences, or of fewer: those whose drafts the token budget has room for."""
        decode_seconds, running = self._settings.decode_seconds, self._parts.scheduler.running
        assert decode_seconds is not None, "there is no stretch without it"
        num_sequences, now = len(sequences), self._virtual_clock.now
        lengths = [sum(some) for some in zip(*[ahead.lengths for ahead in sequences], strict=False)]
        drafted = [sum(some) for some in zip(*[ahead.num_drafted for ahead in sequences], strict=False)]
        asked = sorted(
            self._executor.num_asked(one.spec, ahead.lengths, one.draft_limit_within(most_drafted))
            if most_drafted
            else 0
            for ahead, one in zip(sequences, running, strict=True)
        )
        stretch = DecodeStretch(sequences, [], [], [], [], [], ends_texts=False)
        for step in range(num_steps):
            num_rows = num_sequences + drafted[step]
            if num_rows > self._settings.max_num_batched_tokens:
                return stretch
            seconds = decode_seconds(num_rows, num_sequences, lengths[step] - num_sequences)
            num_asked = num_sequences - bisect_right(asked, step + 1)
            drafting = self._settings.draft_seconds(num_asked, drafted[step + 1]) if num_asked else 0.0
            stretch.starts.append(now)
            stretch.seconds.append(seconds)
            stretch.drafting.append(drafting)
            now += seconds + drafting
            stretch.ends.append(now)
            stretch.num_tokens.append(lengths[step + 1] - lengths[step])
        ends_texts = any(
            ahead.lengths[num_steps] >= one.spec.max_length for ahead, one in zip(sequences, running, strict=True)
        )
        return replace(stretch, ends_texts=ends_texts)

    def take(self, stretch: DecodeStretch, num_steps: int) -> tuple[list[int], list[RequestOutput]]:
        """Take the first steps of the stretch ahead; the blocks held while each ran, and the requests that the last one ended."""
        running = self._parts.scheduler.running.copy()
        most_drafted = self._parts.control.draft_limit(len(running))
        tails = []  # what each computes: the token that it has not computed yet, then the new ones
        for one, ahead in zip(running, stretch.sequences, strict=True):
            token_ids, draft = self._executor.take(one.spec.seq_id, ahead, num_steps)
            tails.append([one.output_ids[-1], *token_ids])
            one.output_ids += token_ids
            one.draft, one.draft_limit = draft, one.draft_limit_within(most_drafted)
            self._count(one, ahead.drafted[:num_steps])
        times = self.stats.times
        for seconds, drafting in zip(stretch.seconds[:num_steps], stretch.drafting, strict=False):
            times.forward += seconds
            times.draft += drafting
        times.num_steps += num_steps
        self.stats.num_generation_tokens += sum(stretch.num_tokens[:num_steps])
        self._num_executed += num_steps
        self._virtual_clock.now = stretch.ends[num_steps - 1]
        held = self._move_blocks(running, stretch.sequences, tails, num_steps)
        output = StepOutput()
        for one in running:
            if one.finished:
                self._conclude(self._requests[one.request_id], output)
        return held, output.finished

    def _count(self, one: Generation, drafted: Sequence[Drafted]) -> None:
        """Note what became of a sequence's drafts, one after the other, and how its tokens came to be."""
        counts: Mapping[Drafted, int] = {drafted[0]: len(drafted)}
        if drafted.count(drafted[0]) == len(drafted):  # where nothing is drafted, say
            one.origins += _verdict(drafted[0]).origins * len(drafted)
        else:
            one.origins += [origin for found in drafted for origin in _verdict(found).origins]
            counts = Counter(drafted)
        for found, times in counts.items():
            draft = _verdict(found).draft
            one.stats.record(draft, found.right, times=times)
            self.stats.speculation.record(draft, found.right, times=times)

    def _move_blocks(
        self,
        running: Sequence[Generation],
        sequences: Sequence[StepsAhead],
        tails: Sequence[Sequence[int]],
        num_steps: int,
    ) -> list[int]:
        """Reserve, fill and give back blocks step by step, and end the texts that the last step ends; the blocks held in each."""
        pool, block_size = self._parts.pool, self._settings.block_size
        firsts = [one.table.num_computed for one in running]
        begun, drafted, done = _block_changes(sequences, num_steps, block_size)
        done[-1] = [*range(len(running))]  # each has its last tokens yet to commit, or its end
        held = []
        for step in range(num_steps):
            for number in begun[step]:
                table = running[number].table
                table.allocate(sequences[number].lengths[step] - table.num_computed)
            for number in drafted[step]:
                table, ahead = running[number].table, sequences[number]
                table.allocate(ahead.lengths[step] + ahead.num_drafted[step] - table.num_computed)
            held.append(pool.num_blocks - pool.num_free)
            for number in done[step]:
                one, length, first = running[number], sequences[number].lengths[step + 1], firsts[number]
                one.table.commit(tails[number][one.table.num_computed - first : length - 1 - first])
                one.table.release_surplus()
                if length >= one.spec.max_length:
                    one.finish("length")
                    self._retire(one)
        return held


class _Verdict(NamedTuple):
    """A draft as the engine counts it, whatever its tokens, and how those came to be that the step gives which verifies it."""

    draft: Draft
    origins: list[Origin]


@functools.lru_cache(maxsize=4096)
def _verdict(drafted: Drafted) -> _Verdict:
    shape, draft = drafted.shape, NO_DRAFT
    if shape.num_nodes:
        draft = Draft((UNKNOWN_TOKEN,) * shape.num_nodes, shape.parents, source=shape.source)
    return _Verdict(draft, origins_of(draft, drafted.right))


class _BlockChanges(NamedTuple):
    """By step, the numbers of the sequences that need new blocks, or have done with some."""

    begun: list[list[int]]  # their next token is in a new block
    drafted: list[list[int]]  # their draft reaches into a new block
    done: list[list[int]]  # they fill a block, or give one back


def _block_changes(sequences: Sequence[StepsAhead], num_steps: int, block_size: int) -> _BlockChanges:
    begun: list[list[int]] = [[] for _ in range(num_steps)]
    drafted: list[list[int]] = [[] for _ in range(num_steps)]
    done: list[list[int]] = [[] for _ in range(num_steps)]
    for number, ahead in enumerate(sequences):
        if not any(ahead.num_drafted[:num_steps]):  # each step gives one token
            first = ahead.lengths[0] - 1
            for step in range(-first % block_size, num_steps, block_size):
                begun[step].append(number)
            for step in range(-(first + 1) % block_size, num_steps, block_size):
                done[step].append(number)
            continue
        for step, length in enumerate(ahead.lengths[:num_steps]):
            last, size = length - 1, ahead.num_drafted[step]  # the place of its newest token; nodes after it
            if not last % block_size:
                begun[step].append(number)
            reaches_on = size and (last + size) // block_size > last // block_size
            if reaches_on:
                drafted[step].append(number)
            if reaches_on or (ahead.lengths[step + 1] - 1) // block_size > last // block_size:
                done[step].append(number)
    return _BlockChanges(begun, drafted, done)


def simulated_engine(
    settings: SimulationSettings,
    control: SpeculationControl = NO_SPECULATION,
    *,
    delay: int = 0,
    clock: VirtualClock | None = None,
) -> SimulatedEngine:
    """Make an engine whose steps take virtual time only.

    Args:
        settings: what is simulated.
        control: says how much is drafted and verified; one that learns belongs to one engine.
        delay: see `Engine`.
        clock: its time; None: a clock of its own that begins at 0.
    """
    clock = VirtualClock() if clock is None else clock
    executor = SimulatedExecutor(
        vocab_size=settings.vocab_size,
        step_seconds=settings.step_seconds,
        clock=clock,
        drafting=settings.drafting,
        draft_seconds=settings.draft_seconds,
        texts=settings.texts,
    )
    pool = BlockPool(settings.num_blocks, enable_prefix_caching=settings.enable_prefix_caching)
    limits = SchedulerLimits(max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=settings.max_num_batched_tokens)
    parts = EngineParts(
        processor=RequestProcessor(
            tokenizer=None,
            executor=executor,
            vocab_size=settings.vocab_size,
            max_model_len=settings.max_model_len,
            eos_token_ids=settings.eos_token_ids,
            pool=pool,
            block_size=settings.block_size,
            random_source=random.Random(settings.seed),
        ),
        pool=pool,
        scheduler=Scheduler(pool, limits, block_size=settings.block_size),
        executor=executor,
        control=control,
        block_size=settings.block_size,
    )
    return SimulatedEngine(parts, settings, delay=delay, clock=clock)
