"""Measures a head where it will be used: held-out prompts, drafted and verified in the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import SpeculativeConfig, resolve_speculative
from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import SpeculationStats
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.models.base import LoadedTarget

NUM_DRAFTED = 3  # tokens of each draft
DRAFTING = {"method": "eagle3", "num_speculative_tokens": NUM_DRAFTED, "draft_sample_method": "coupled"}
"""How it is drafted: with the noise that the target draws with, so that sampled drafts are accepted as often as they can be."""

TEMPERATURES = (0.0, 1.0)
NUM_TOKENS = 128  # of an answer, at most
NUM_TIMED = 4  # prompts that are answered alone, with and without drafts, to compare times


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """How drafts of `NUM_DRAFTED` tokens fared at one temperature.

    Attributes:
        temperature: of the answers.
        length: tokens of a step, the target's own included.
        per_position: share of drafts whose token at each position was accepted.
        num_steps: steps that were counted.
    """

    temperature: float
    length: float
    per_position: list[float]
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a head is worth on this machine.

    Attributes:
        num_tokens: tokens that it had been trained on, each time they were.
        at: acceptance, by temperature.
        draft_ms: milliseconds that a drafted token takes, one sequence at a time; None if that was not measured, as on a GPU
            that drafts within its steps.
        speed_up: greedy tokens per second with drafts / without, one sequence at a time; None if that was not measured.
    """

    num_tokens: int
    at: list[Acceptance]
    draft_ms: float | None = None
    speed_up: float | None = None

    @property
    def length(self) -> float:
        """The acceptance length by which heads are compared: the mean over temperatures."""
        return sum(one.length for one in self.at) / len(self.at)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Measurement:
        """Read what `to_json` gave."""
        return cls(**{**content, "at": [Acceptance(**one) for one in content["at"]]})


def measure_head(
    target: LoadedTarget,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    *,
    settings: EngineSettings,
    num_tokens: int,
) -> Measurement:
    """Answer prompts with the head's drafts, all of `NUM_DRAFTED` tokens, and count what is accepted.

    Args:
        target: the loaded target.
        folder: of the head.
        prompts: token ids that were not trained on.
        settings: of the engine.
        num_tokens: tokens that the head was trained on, for the record.

    Raises:
        ConfigError: there is no prompt.
        ModelError: the head cannot be loaded.
    """
    if not prompts:
        raise ConfigError("measure: no conversation was held out; write more of them")
    llm = LLM.from_target(target, settings, resolve_speculative({**DRAFTING, "model": str(folder)}))
    at = []
    for temperature in TEMPERATURES:
        llm.reset_stats()
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=NUM_TOKENS) for i in range(len(prompts))]
        llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
        at.append(_acceptance(temperature, llm.stats.speculation))
    return Measurement(num_tokens=num_tokens, at=at)


def measure_times(
    target: LoadedTarget,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    measured: Measurement,
    *,
    settings: EngineSettings,
) -> Measurement:
    """Add to a measurement what a drafted token costs, and the speed-up of answers, one after the other."""
    drafting = LLM.from_target(target, settings, resolve_speculative({**DRAFTING, "model": str(folder)}))
    plain = LLM.from_target(target, settings, SpeculativeConfig())
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    num_tokens, seconds = dict.fromkeys((drafting, plain), 0), dict.fromkeys((drafting, plain), 0.0)
    for prompt in prompts[:NUM_TIMED]:
        for llm in (drafting, plain):  # in turn, since the machine's speed drifts
            begin = time.perf_counter()
            (output,) = llm.generate([list(prompt)], params, use_tqdm=False)
            seconds[llm] += time.perf_counter() - begin
            num_tokens[llm] += len(output.outputs[0].token_ids)  # torch's texts may part at near-ties
    stats = drafting.stats
    draft_ms = 1e3 * stats.times.draft / max(1, stats.speculation.num_draft_tokens)
    speed_up = num_tokens[drafting] / seconds[drafting] * seconds[plain] / num_tokens[plain]
    return replace(measured, draft_ms=None if stats.times.launch else draft_ms, speed_up=speed_up)


def _acceptance(temperature: float, stats: SpeculationStats) -> Acceptance:
    return Acceptance(
        temperature=temperature,
        length=stats.acceptance_length or 1.0,
        per_position=stats.acceptance_per_position,
        num_steps=stats.num_steps,
    )
