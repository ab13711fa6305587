"""What a drafter costs in an engine, and where texts do not decide it, what its drafts yield."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.bench.compare import make_engine
from forerun.bench.instruments import Clock, Progress, no_progress
from forerun.bench.profiling.filling import ExecutedStep, ObservedExecutor
from forerun.bench.profiling.grid import DRAFTING_BATCHES, DRAFTING_TOKENS
from forerun.bench.recording import RecordedText
from forerun.config.settings import EngineSettings
from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import SpeculationStats
from forerun.engine.engine import Engine
from forerun.engine.speculation import FixedLength
from forerun.llm import LLM
from forerun.models.base import LoadedTarget
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.step_times import FREE_DRAFTING, DraftingCost, DraftingSample, StepTimeModel

LIVE_BATCH_SIZES = (1, 4)
NUM_WARMUP_STEPS = 4
LEAST_SLOWNESS = 0.25  # of memory, beside the step times: where it comes out lower, the machine is quicker in all
INTERRUPTED = 5.0  # a step so many times as slow as the median of its like was interrupted, and does not count


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDrafts:
    """The fate of drafts in an engine, by kind of prompts."""

    stats: dict[str, SpeculationStats]
    num_speculative_tokens: int
    method: str

    def acceptance(self, kind: str | None = None) -> AcceptanceProfile:
        """Of the drafts for a kind of prompts; None: for all."""
        stats = SpeculationStats()
        for name, one in self.stats.items():
            if kind is None or name == kind:
                stats.add(one)
        stood = stats.accepted_per_position[: self.num_speculative_tokens] or [0]
        return AcceptanceProfile.of_counts(self.method, stats.num_steps, stood, num_nodes=stats.num_draft_tokens)


@dataclass(frozen=True, slots=True)
class _TimedStep:
    """A step that read no prompt, and what it took, drafting included."""

    step: ExecutedStep
    seconds: float


def measure_drafting_cost(
    name: str,
    target: LoadedTarget,
    settings: EngineSettings,
    config: Mapping[str, Any],
    texts: Sequence[RecordedText],
    step_times: StepTimeModel,
    *,
    progress: Progress = no_progress,
    clock: Clock = time.perf_counter,
) -> DraftingCost:
    """Answer recorded prompts again, in batches of different sizes, with a configuration and without drafts in turn.

    A step's cost of drafting, also where nothing is found, is all that it takes beyond the step times of its rows: asking the
    drafter, and what comes with drafts (hidden states and candidates that it reads, the choice of lengths, what it learns).
    The plain steps of the same batch, which wait for memory, say how fast that is meanwhile. The configuration chooses the
    lengths of its drafts. Where a class has fewer prompts than a batch, some come again.

    Args:
        name: of the configuration.
        target: the model.
        settings: of the engine.
        config: speculative_config.
        texts: whose prompts are answered.
        step_times: what steps take, drafting left out.
        progress: is called with the state of the work.
        clock: times the steps.

    Raises:
        ForerunError: the configuration (named in the message) does not fit the model.
    """
    longest = max(len(text.prompt_ids) for text in texts) + DRAFTING_TOKENS
    sizes = [size for size in DRAFTING_BATCHES if size <= settings.max_num_seqs]
    plain, drafting = (
        make_engine(name, target, settings, one, num_sequences=max(sizes), longest=longest) for one in (None, config)
    )
    samples: list[DraftingSample] = []
    for size in sizes:
        for kind, of_kind in _by_kind(texts).items():
            for number in range(DRAFTING_BATCHES[size]):
                progress(f"{name}: {kind}, {size} at once")
                batch = [of_kind[place % len(of_kind)] for place in range(number * size, (number + 1) * size)]
                in_turn = (plain, drafting) if number % 2 == 0 else (drafting, plain)
                found = {llm: _timed_steps(llm, batch, f"{kind}-{size}-{number}", clock) for llm in in_turn}
                samples += _samples(found[plain], found[drafting], step_times)
    return DraftingCost.fit(samples) if samples else FREE_DRAFTING


def _samples(
    plain: Sequence[_TimedStep], drafting: Sequence[_TimedStep], step_times: StepTimeModel
) -> Iterator[DraftingSample]:
    """What drafting took in steps of the same batch, with memory as fast as in the plain ones."""
    if not plain or not drafting:
        return
    todays_times = _todays_times(plain, step_times)
    for one in drafting:
        seconds = one.seconds - todays_times.of_shape(one.step.shape)
        yield DraftingSample(one.step.shape.num_sequences, one.step.num_drafted, seconds)


def _todays_times(plain: Sequence[_TimedStep], step_times: StepTimeModel) -> StepTimeModel:
    """Step times with memory as slow as plain steps, which mostly wait for it, are now."""
    measured, expected = sum(one.seconds for one in plain), sum(step_times.of_shape(one.step.shape) for one in plain)
    slow_memory = step_times.scaled(memory=2.0)
    seconds_of_reading = sum(slow_memory.of_shape(one.step.shape) for one in plain) - expected
    slowness = 1.0 + (measured - expected) / seconds_of_reading
    if slowness >= LEAST_SLOWNESS:
        return step_times.scaled(memory=slowness)
    return step_times.scaled(memory=measured / expected, arithmetic=measured / expected)


def _timed_steps(llm: LLM, texts: Sequence[RecordedText], name: str, clock: Clock) -> list[_TimedStep]:
    """Answer prompts at once; the steps that read no prompt and were not interrupted, without the first ones."""
    observed = ObservedExecutor(llm.engine.parts.executor)
    engine = Engine(replace(llm.engine.parts, executor=observed))
    _add(engine, texts, name, num_tokens=DRAFTING_TOKENS)
    found = []
    while engine.has_work:
        start = clock()
        engine.step()
        seconds = clock() - start
        if not observed.steps[-1].num_prompts:
            found.append(_TimedStep(observed.steps[-1], seconds))
    found = found[NUM_WARMUP_STEPS:]
    alike = [[one for one in found if bool(one.step.num_drafted) == has_drafted] for has_drafted in (False, True)]
    most = [INTERRUPTED * statistics.median(one.seconds for one in some) if some else 0.0 for some in alike]
    return [one for some, limit in zip(alike, most, strict=True) for one in some if one.seconds <= limit]


def measure_live(
    name: str,
    target: LoadedTarget,
    settings: EngineSettings,
    config: Mapping[str, Any],
    texts: Sequence[RecordedText],
    *,
    num_tokens: int,
    progress: Progress = no_progress,
) -> LiveDrafts:
    """Answer recorded prompts again with a configuration, and see which drafts stand.

    Drafts have the greatest length in every step, so that acceptance is measured at every place.

    Args:
        name: of the configuration.
        target: the model.
        settings: of the engine.
        config: speculative_config.
        texts: whose prompts are answered.
        num_tokens: of each answer.
        progress: is called with the state of the work.

    Raises:
        ForerunError: the configuration (named in the message) does not fit the model.
    """
    longest = max(len(text.prompt_ids) for text in texts) + num_tokens
    llm = make_engine(name, target, settings, config, num_sequences=max(LIVE_BATCH_SIZES), longest=longest)
    limit = llm.speculative.num_speculative_tokens
    stats: dict[str, SpeculationStats] = {}
    for size in LIVE_BATCH_SIZES:
        for kind, of_kind in _by_kind(texts).items():
            progress(f"{name}: {kind}, {size} at once")
            engine = Engine(replace(llm.engine.parts, control=FixedLength(num_speculative_tokens=limit)))
            _add(engine, of_kind[:size], f"{kind}-{size}", num_tokens=num_tokens)
            while engine.has_work:
                engine.step()
            stats.setdefault(kind, SpeculationStats()).add(engine.stats.speculation)
    return LiveDrafts(stats=stats, num_speculative_tokens=limit, method=llm.speculative.method)


def _by_kind(texts: Sequence[RecordedText]) -> dict[str, list[RecordedText]]:
    kinds: dict[str, list[RecordedText]] = {}
    for text in texts:
        kinds.setdefault(text.kind, []).append(text)
    return kinds


def _add(engine: Engine, texts: Sequence[RecordedText], name: str, *, num_tokens: int) -> None:
    """Ask an engine for answers of so many tokens, with prompts that it finds in no prefix cache."""
    for number, text in enumerate(texts):
        sampling = SamplingParams(
            temperature=text.temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False, seed=number
        )
        engine.add_request(f"{name}-{number}", text.prompt_ids, sampling, cache_salt=name)
