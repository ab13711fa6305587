"""How fast the machine is at the moment: steps of plain decoding against what a profile says of them."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from statistics import fmean

from forerun.bench.compare import make_engine
from forerun.bench.profiling.filling import ObservedExecutor
from forerun.config.settings import EngineSettings
from forerun.core.sampling_params import SamplingParams
from forerun.engine.engine import Engine
from forerun.models.base import LoadedTarget
from forerun.plan.profile import Profile
from forerun.plan.step_times import StepTimeModel

BATCH_SIZES = (1, 8)
NUM_PROMPT_TOKENS, NUM_TOKENS = 200, 80
NUM_REPEATS = 3


class StepProbe:
    """Times plain decoding in this process.

    A probe of the memory alone says little of a step: on a machine that is shared, both memory and cores are
    slowed down, by different factors and for different times.
    """

    def __init__(self, target: LoadedTarget, settings: EngineSettings, profile: Profile) -> None:
        self._step_times: StepTimeModel = profile.step_times
        self._vocab_size = target.model.vocab_size
        longest = NUM_PROMPT_TOKENS + NUM_TOKENS
        self._llm = make_engine("probe", target, settings, None, num_sequences=max(BATCH_SIZES), longest=longest)

    def slowness(self) -> float:
        """Seconds of the steps of some batches now, over what the profile says of them."""
        return fmean(self._slowness(size) for _ in range(NUM_REPEATS) for size in BATCH_SIZES)

    def _slowness(self, num_sequences: int) -> float:
        observed = ObservedExecutor(self._llm.engine.parts.executor)
        engine = Engine(replace(self._llm.engine.parts, executor=observed))
        sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        for number in range(num_sequences):
            prompt = [random.randrange(self._vocab_size) for _ in range(NUM_PROMPT_TOKENS)]
            engine.add_request(f"probe-{number}", prompt, sampling)
        measured = expected = 0.0
        while engine.has_work:
            start = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - start
            step = observed.steps[-1]
            if not step.num_prompts:
                measured += seconds
                expected += self._step_times.seconds(
                    num_rows=num_sequences,
                    num_sequences=num_sequences,
                    num_context_tokens=step.shape.num_context_tokens,
                )
        return measured / expected
