"""Times real steps of an engine, host included: prompts of every length, and batches with drafts of every length."""

from __future__ import annotations

import csv
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

from forerun.bench.energy import EnergyMeter
from forerun.bench.instruments import BandwidthProbe, Clock, Progress, no_progress
from forerun.bench.passes import PassShape, random_sequences
from forerun.bench.profiling.filling import CopiedContexts, ExecutedStep, LengthsInTurn, ObservedExecutor
from forerun.bench.profiling.grid import MIXED_ROWS, NUM_WARMUP_ROUNDS, Cell, ProfileGrid
from forerun.core.sampling_params import SamplingParams
from forerun.engine.engine import Engine
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.plan.step_times import StepSample

PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step of a sweep, and what it belongs to: the kind of sweep, its cell, its round and the memory's speed then."""

    sweep: str
    round: int
    gigabytes_per_second: float | None  # None: not probed
    num_sequences: int  # of the cell
    context: int  # of the cell; of a prompt, its length
    sample: StepSample


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPrompt:
    """A prompt that an idle engine read: seconds to its first token."""

    isl: int
    ttft_seconds: float


@dataclass(slots=True, kw_only=True)
class RoundResult:
    """What a round measured."""

    gigabytes_per_second: float | None  # None: not probed
    steps: list[MeasuredStep] = field(default_factory=list)
    prompts: list[MeasuredPrompt] = field(default_factory=list)
    watts: float | None = None  # mean; None: no counter
    idle_watts: float | None = None  # of the machine at rest

    def to_json(self) -> dict[str, Any]:
        """The result as `from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> RoundResult:
        """The result of a record that `to_json` made."""
        steps = [MeasuredStep(**one | {"sample": StepSample(**one["sample"])}) for one in record["steps"]]
        prompts = [MeasuredPrompt(**one) for one in record["prompts"]]
        return cls(**record | {"steps": steps, "prompts": prompts})


class StepSweep:
    """Measures a grid's steps on an idle engine whose drafter fills drafts; made by `step_sweep`."""

    def __init__(
        self,
        llm: LLM,
        grid: ProfileGrid,
        contexts: CopiedContexts,
        probe: BandwidthProbe,
        meter: EnergyMeter,
        clock: Clock,
    ) -> None:
        self._llm = llm
        self._grid = grid
        self._contexts = contexts
        self._probe = probe
        self._meter = meter
        self._clock = clock
        self._ids = count()

    def warm_up(self, progress: Progress = no_progress) -> None:
        """Run rounds that are thrown away: they touch memory that nobody has touched."""
        for _ in range(NUM_WARMUP_ROUNDS):
            self.run_round(-1, lambda line: progress(f"warming up: {line}"))

    def run_round(self, number: int, progress: Progress = no_progress) -> RoundResult:
        """Measure everything once, in an order of its own, so that a drift of the machine affects all alike."""
        result = RoundResult(gigabytes_per_second=self._probe.measure() / 1e9)
        jobs = self._grid.jobs()
        random.Random(number).shuffle(jobs)
        with self._meter:
            for place, job in enumerate(jobs):
                progress(f"{place} of {len(jobs)} measurements")
                if isinstance(job, int):
                    self._measure_prompt(job, number, result)
                else:
                    self._measure_batch(job, number, result)
        energy = self._meter.energy
        result.idle_watts = energy.idle_w
        result.watts = None if energy.joules is None else energy.joules / energy.window_s
        if result.watts is not None:
            result.steps = [_with_energy(step, result.watts) for step in result.steps]
        return result

    def _measure_prompt(self, length: int, number: int, result: RoundResult) -> None:
        """Read a prompt of its own on the idle engine."""
        engine, observed = self._engine((0,))
        self._submit(engine, self._contexts.prompt(length), max_tokens=1)
        steps = list(self._steps(engine, observed))
        result.prompts.append(MeasuredPrompt(isl=length, ttft_seconds=sum(seconds for _, seconds in steps)))
        self._note(steps, PREFILL, Cell(0, length), number, result)

    def _measure_batch(self, cell: Cell, number: int, result: RoundResult) -> None:
        """Decode a batch with drafts of every length in turn, then let it read a prompt beside."""
        grid = self._grid
        lengths = [length for length in grid.lengths_for(cell.num_sequences) for _ in range(grid.steps)]
        random.Random(number).shuffle(lengths)
        engine, observed = self._engine(tuple(lengths))
        num_tokens = grid.num_batch_steps * 2
        requests = [
            self._submit(engine, self._contexts.cached_prompt(cell.context), max_tokens=num_tokens)
            for _ in range(cell.num_sequences)
        ]
        steps: list[tuple[ExecutedStep, float]] = []
        stepping = self._steps(engine, observed)
        while sum(not step.num_prompts for step, _ in steps) < len(lengths) + 1:
            found = next(stepping, None)
            if found is None:
                break
            steps.append(found)
        # the first step without prompts verifies what was drafted while others still read theirs
        decoding = [found for found in steps if not found[0].num_prompts][1:]
        self._note(decoding, DECODE, cell, number, result)
        rows = MIXED_ROWS[number % len(MIXED_ROWS)]
        self._submit(engine, self._contexts.prompt(min(rows, self._llm.max_model_len - 1)), max_tokens=1)
        mixed = next(stepping, None)
        if mixed is not None and mixed[0].num_prompts == 1:
            self._note([mixed], MIXED, cell, number, result)
        for request_id in requests:
            engine.abort(request_id)
        for _ in stepping:
            pass

    def _engine(self, lengths: Sequence[int]) -> tuple[Engine, ObservedExecutor]:
        """An engine over the same parts, that drafts these lengths in turn, and whose steps are noted."""
        observed = ObservedExecutor(self._llm.engine.parts.executor)
        parts = replace(self._llm.engine.parts, executor=observed, control=LengthsInTurn(lengths))
        return Engine(parts), observed

    def _submit(self, engine: Engine, prompt: list[int], *, max_tokens: int) -> str:
        request_id = f"profile-{next(self._ids)}"
        sampling = SamplingParams(
            temperature=0,
            max_tokens=min(max_tokens, self._llm.max_model_len - len(prompt)),
            ignore_eos=True,
            detokenize=False,
        )
        engine.add_request(request_id, prompt, sampling)
        return request_id

    def _steps(self, engine: Engine, observed: ObservedExecutor) -> Iterator[tuple[ExecutedStep, float]]:
        """Step to the end; what each step was made of, and its seconds without drafting."""
        while engine.has_work:
            start = self._clock()
            engine.step()
            seconds = self._clock() - start
            step = observed.steps[-1]
            yield step, seconds - step.draft_seconds

    def _note(
        self,
        steps: Sequence[tuple[ExecutedStep, float]],
        sweep: str,
        cell: Cell,
        number: int,
        result: RoundResult,
    ) -> None:
        for step, seconds in steps:
            sample = StepSample.of_shape(step.shape, seconds)
            result.steps.append(
                MeasuredStep(
                    sweep=sweep,
                    round=number,
                    gigabytes_per_second=result.gigabytes_per_second,
                    num_sequences=cell.num_sequences,
                    context=cell.context,
                    sample=sample,
                )
            )


@contextmanager
def step_sweep(
    llm: LLM,
    grid: ProfileGrid,
    probe: BandwidthProbe,
    meter: EnergyMeter,
    *,
    clock: Clock = time.perf_counter,
) -> Iterator[StepSweep]:
    """A sweep over an idle engine; the KV of the longest context is computed once, and given back at the end.

    Args:
        llm: the engine, made with `filling_config`.
        grid: what is measured; the engine must have room for it.
        probe: of the memory's bandwidth, between rounds.
        meter: of energy.
        clock: times the steps.

    Raises:
        ConfigError: the engine has no prefix cache, or no room.
    """
    if not llm.settings.enable_prefix_caching:
        raise ConfigError(
            "profile: contexts are copied by the prefix cache, which is off; leave enable_prefix_caching on"
        )
    parts = llm.engine.parts
    with random_sequences(llm, [PassShape(context=max(grid.contexts), num_sequences=1, rows=1)]) as computed:
        contexts = CopiedContexts(
            computed, parts.pool, block_size=parts.block_size, vocab_size=llm.executor.model.vocab_size
        )
        yield StepSweep(llm, grid, contexts, probe, meter, clock)


def _with_energy(step: MeasuredStep, watts: float) -> MeasuredStep:
    """The step with its share of the round's energy, by time: counters are too slow for one step."""
    return replace(step, sample=replace(step.sample, energy_joules=watts * step.sample.seconds))


def level_rounds(rounds: Sequence[RoundResult]) -> list[StepSample]:
    """The steps of all rounds at the machine's usual speed: what slowed a whole round down alike is taken out of it.

    A round's speed is the median, over what was measured in it, of its time to the median round's.
    """
    medians = [_medians(one.steps) for one in rounds]
    usual = {key: statistics.median([one[key] for one in medians if key in one]) for key in set().union(*medians)}
    samples = []
    for one, found in zip(rounds, medians, strict=True):
        level = statistics.median([seconds / usual[key] for key, seconds in found.items()]) if found else 1.0
        samples += [replace(step.sample, seconds=step.sample.seconds / level) for step in one.steps]
    return samples


def _medians(steps: Sequence[MeasuredStep]) -> dict[tuple[str, int, int, int], float]:
    """Median seconds of the steps of each kind and cell, by their draft tokens."""
    found: dict[tuple[str, int, int, int], list[float]] = {}
    for step in steps:
        key = step.sweep, step.num_sequences, step.context, step.sample.num_draft_tokens
        found.setdefault(key, []).append(step.sample.seconds)
    return {key: statistics.median(seconds) for key, seconds in found.items()}


Cells = dict[tuple[int, int, int], float]
"""(sequences, context, draft length) -> median seconds of a step, drafting left out."""


def step_medians(steps: Sequence[MeasuredStep], *, draft_length: int | None = None) -> Cells:
    """Median seconds of the steps in which all sequences decoded, by the mean length of their drafts, or as of one length."""
    found: dict[tuple[int, int, int], list[float]] = {}
    for step in steps:
        sample = step.sample
        if step.sweep == DECODE and sample.num_sequences == step.num_sequences:
            length = round(sample.num_draft_tokens / step.num_sequences) if draft_length is None else draft_length
            found.setdefault((step.num_sequences, step.context, length), []).append(sample.seconds)
    return {cell: statistics.median(seconds) for cell, seconds in sorted(found.items())}


COLUMNS = ("sweep", "round", "gigabytes_per_second", "sequences", "context")


def write_sweep(path: Path, steps: Sequence[MeasuredStep]) -> None:
    """Write sweep.csv: a row for each measured step."""
    names = [one.name for one in fields(StepSample)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*COLUMNS, *names])
        for step in steps:
            of_sample = [getattr(step.sample, name) for name in names]
            speed = None if step.gigabytes_per_second is None else round(step.gigabytes_per_second, 3)
            writer.writerow([step.sweep, step.round, speed, step.num_sequences, step.context, *of_sample])
