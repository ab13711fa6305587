"""How fast the machine is at the moment: steps of plain decoding and prompts, against what a profile says of them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import NamedTuple

from forerun.bench.compare import make_engine
from forerun.bench.profiling.filling import ObservedExecutor
from forerun.config.settings import EngineSettings
from forerun.core.sampling_params import SamplingParams
from forerun.engine.engine import Engine
from forerun.models.base import LoadedTarget
from forerun.plan.profile import Profile
from forerun.plan.step_times import StepSample, StepTimeModel

BATCH_SIZES = (1, 4, 8)
NUM_PROMPT_TOKENS, NUM_TOKENS = 128, 48
LEAST_SLOWNESS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """How many times as long the machine takes as in a profile: to read memory, and for arithmetic."""

    memory: float
    arithmetic: float

    @classmethod
    def mean(cls, found: Sequence[Slowness]) -> Slowness:
        """Of several moments."""
        return cls(memory=fmean(one.memory for one in found), arithmetic=fmean(one.arithmetic for one in found))

    def change_since(self, before: Slowness) -> float:
        """By how much it changed, on average over both."""
        then, now = asdict(before), asdict(self)
        return fmean(abs(math.log(now[part] / then[part])) for part in now)

    def of(self, step_times: StepTimeModel) -> StepTimeModel:
        """The step times of the machine as slow as that."""
        return step_times.scaled(**asdict(self))


AS_PROFILED = Slowness(memory=1.0, arithmetic=1.0)


class _Parts(NamedTuple):
    """What a profile says of some steps' seconds: the part that goes with memory, the one that goes with arithmetic."""

    memory: float
    arithmetic: float


def slowness_of(decoding: Sequence[StepSample], prompts: Sequence[StepSample], step_times: StepTimeModel) -> Slowness:
    """The slowness with which both sums of seconds, of decoding steps and of prompts, are those of the profile.

    Decoding a few sequences is mostly the reading of weights, a prompt mostly arithmetic: two equations for both.
    A program that takes a core for some milliseconds hits either: where one part would be next to nothing, both are
    taken for equally slow.
    """
    seconds = [sum(one.seconds for one in samples) for samples in (decoding, prompts)]
    parts = [_parts(samples, step_times) for samples in (decoding, prompts)]
    (a, b), (c, d) = parts
    memory = (seconds[0] * d - seconds[1] * b) / (a * d - b * c)
    arithmetic = (seconds[1] * a - seconds[0] * c) / (a * d - b * c)
    if min(memory, arithmetic) < LEAST_SLOWNESS:
        memory = arithmetic = sum(seconds) / sum(map(sum, parts))
    return Slowness(memory=memory, arithmetic=arithmetic)


def _parts(samples: Sequence[StepSample], step_times: StepTimeModel) -> _Parts:
    def seconds(model: StepTimeModel) -> float:
        return sum(
            model.seconds(
                num_rows=one.num_rows,
                num_sequences=one.num_sequences,
                num_context_tokens=one.num_context_tokens,
                num_prompt_rows=one.num_prompt_rows,
                num_prompt_context=one.num_prompt_context,
            )
            for one in samples
        )

    at_all = seconds(step_times)
    memory = seconds(step_times.scaled(memory=2.0)) - at_all
    return _Parts(memory, at_all - memory)


class SpeedProbe:
    """Times prompts and plain decoding in this process, for a second or two.

    A probe of the memory alone says little of a step: on a machine that is shared, both memory and cores are
    slowed down, by different factors and for different times.
    """

    def __init__(
        self,
        target: LoadedTarget,
        settings: EngineSettings,
        profile: Profile,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._step_times = profile.step_times
        self._vocab_size = target.model.vocab_size
        self._clock = clock
        longest = NUM_PROMPT_TOKENS + NUM_TOKENS
        self._llm = make_engine("probe", target, settings, None, num_sequences=max(BATCH_SIZES), longest=longest)
        self.measure()  # the first touches memory that nobody has touched

    def measure(self) -> Slowness:
        """How slow the machine is now."""
        decoding: list[StepSample] = []
        prompts: list[StepSample] = []
        for size in BATCH_SIZES:
            for sample in self._steps(size):
                (prompts if sample.num_prompt_rows else decoding).append(sample)
        return slowness_of(decoding, prompts, self._step_times)

    def _steps(self, num_sequences: int) -> list[StepSample]:
        """The steps of a batch: its prompts, one after the other, then its decoding."""
        observed = ObservedExecutor(self._llm.engine.parts.executor)
        engine = Engine(replace(self._llm.engine.parts, executor=observed))
        sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        samples = []
        for number in range(num_sequences):
            prompt = [random.randrange(self._vocab_size) for _ in range(NUM_PROMPT_TOKENS)]
            engine.add_request(f"probe-{number}", prompt, sampling)
        while engine.has_work:
            start = self._clock()
            engine.step()
            seconds = self._clock() - start
            samples.append(StepSample.of_shape(observed.steps[-1].shape, seconds))
        return samples
