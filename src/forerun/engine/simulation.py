"""An engine in virtual time: real scheduling, KV accounting and statistics over an executor that computes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.core.outputs import Origin
from forerun.core.step import StepPlan
from forerun.engine.engine import Engine, EngineParts
from forerun.engine.generation import Generation
from forerun.engine.request import RequestProcessor
from forerun.engine.scheduler import Scheduler, SchedulerLimits
from forerun.engine.speculation import FixedLength, SpeculationControl
from forerun.errors import ConfigError
from forerun.executor.simulated import DraftSeconds, SimulatedExecutor, VirtualClock, drafting_is_free
from forerun.executor.simulated_text import Drafting, Texts
from forerun.kv.block_pool import BlockPool

NO_SPECULATION = FixedLength(num_speculative_tokens=0)


def linear_step_seconds(plan: StepPlan) -> float:
    """4 ms, and 0.1 ms for each row: a small model on a processor."""
    return 0.004 + 0.0001 * len(plan.rows.token_ids)


def linear_decode_seconds(num_sequences: int, num_context_tokens: int) -> float:  # noqa: ARG001 - it does not depend on it
    """What `linear_step_seconds` says of a step with one row for each sequence."""
    return 0.004 + 0.0001 * num_sequences


DecodeSeconds = Callable[[int, int], float]
"""Seconds of a step with one row for each sequence, by the sequences and the tokens that they have in the KV cache before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """What is simulated, in the names of `EngineSettings` where it has the setting.

    `step_seconds` says what a step takes, drafting left out, and `draft_seconds` what that takes.
    `decode_seconds` says the same as `step_seconds` of steps that compute one row for each sequence: where it
    is given, an engine can take such steps together, see `DecodeStretch`.
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


@dataclass(frozen=True, slots=True)
class DecodeStretch:
    """Steps to come in which each running sequence gets one token and nothing else changes, as far as nobody intervenes."""

    starts: list[float]  # of each step, by the engine's clock
    seconds: list[float]  # that each takes
    ends: list[float]

    @property
    def end(self) -> float:
        """The end of the last step."""
        return self.ends[-1]


MOST_STEPS = 64
"""Of a stretch: a request that arrives soon makes the rest of it void."""


class SimulatedEngine(Engine):
    """An engine in virtual time, which takes steps together where all that they do is known before.

    So it is where no sequence drafts, ends, waits for memory or reads a prompt: most steps of a busy engine. What
    it has done after them is, to the bit, what as many calls of `step` would have.
    """

    def __init__(self, parts: EngineParts, settings: SimulationSettings, *, delay: int, clock: VirtualClock) -> None:
        super().__init__(parts, delay=delay, clock=clock)
        assert isinstance(parts.executor, SimulatedExecutor), "only that writes tokens without a plan"
        self._executor = parts.executor
        self._settings = settings
        self._virtual_clock = clock
        self._is_plain = (
            not delay and isinstance(parts.control, FixedLength) and not parts.control.num_speculative_tokens
        )

    def look_ahead(self) -> DecodeStretch | None:
        """The next steps if they only decode, `MOST_STEPS` at most; None where the next one may do more, or takes nobody knows how long."""
        decode_seconds = self._settings.decode_seconds
        running = self._parts.scheduler.running
        if decode_seconds is None or not running or not self._only_decodes(running):
            return None
        num_steps = min([one.spec.max_length - one.num_tokens - 1 for one in running])  # the last one ends somebody
        num_steps = self._num_steps_in_memory(running, min(num_steps, MOST_STEPS))
        if num_steps < 1:
            return None
        num_context, now = sum([one.table.num_computed for one in running]), self._virtual_clock.now
        stretch = DecodeStretch([], [], [])
        for _ in range(num_steps):
            stretch.starts.append(now)
            seconds = decode_seconds(len(running), num_context)
            stretch.seconds.append(seconds)
            now += seconds
            stretch.ends.append(now)
            num_context += len(running)
        return stretch

    def _only_decodes(self, running: Sequence[Generation]) -> bool:
        """Whether every running sequence will get one token, and nobody who waits can start."""
        limits = self._settings
        if not self._is_plain or len(running) > limits.max_num_batched_tokens:
            return False
        if self._parts.scheduler.waiting and len(running) < limits.max_num_seqs:
            return False
        if len({one.group for one in running}) < len(running):  # a share of the places might be claimed
            return False
        return all(
            one.output_ids and one.num_tokens - one.table.num_computed == 1 and not one.stop_tokens and one.text is None
            for one in running
        )

    def _num_steps_in_memory(self, running: Sequence[Generation], num_steps: int) -> int:
        """The most steps, up to `num_steps`, for whose tokens there are free blocks."""
        num_free, block_size = self._parts.pool.num_free, self._settings.block_size
        while num_steps > 0:
            num_needed = sum(
                [-(-(one.table.num_computed + num_steps) // block_size) - one.table.num_blocks for one in running]
            )
            if num_needed <= num_free:
                break
            num_steps //= 2
        return num_steps

    def take(self, stretch: DecodeStretch, num_steps: int) -> list[int]:
        """Take the first steps of the stretch ahead; the blocks in use after each of them."""
        running, block_size, pool = self._parts.scheduler.running, self._settings.block_size, self._parts.pool
        # what each commits: the token that it has not computed yet, then the new ones but the last
        tails, firsts = [], [one.table.num_computed for one in running]
        by_offset: list[list[int]] = [[] for _ in range(block_size)]
        for number, one in enumerate(running):
            by_offset[firsts[number] % block_size].append(number)
            token_ids = self._executor.write(one.spec.seq_id, num_steps)
            tails.append([one.output_ids[-1], *token_ids])
            one.output_ids += token_ids
            one.origins += [Origin.BONUS] * num_steps
            one.stats.num_steps += num_steps
        used = []
        for step in range(num_steps):
            for number in by_offset[-step % block_size]:  # whose next place is in a new block
                running[number].table.allocate(1)
            for number in by_offset[(-step - 1) % block_size]:  # whose block is full after it
                table = running[number].table
                done = table.num_computed - firsts[number]
                table.commit(tails[number][done : step + 1])
            used.append(pool.num_blocks - pool.num_free)
        for one, first, tail in zip(running, firsts, tails, strict=True):
            one.table.commit(tail[one.table.num_computed - first : num_steps])
        times = self.stats.times
        for seconds in stretch.seconds[:num_steps]:
            times.forward += seconds
        times.num_steps += num_steps
        self.stats.num_generation_tokens += num_steps * len(running)
        self.stats.speculation.num_steps += num_steps * len(running)
        self._num_executed += num_steps
        self._virtual_clock.now = stretch.ends[num_steps - 1]
        return used


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
