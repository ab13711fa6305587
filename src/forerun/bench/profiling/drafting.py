"""What a drafter costs in an engine, and where texts do not decide it, what its drafts yield."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.bench.compare import make_engine
from forerun.bench.instruments import Progress, no_progress
from forerun.bench.profiling.filling import ObservedExecutor
from forerun.bench.recording import RecordedText
from forerun.config.settings import EngineSettings
from forerun.core.sampling_params import SamplingParams
from forerun.core.stats import SpeculationStats
from forerun.engine.engine import Engine
from forerun.engine.speculation import FixedLength
from forerun.models.base import LoadedTarget
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.step_times import DraftingCost

BATCH_SIZES = (1, 4)
NUM_TOKENS = 48  # of each answer, where only the cost is measured
NUM_WARMUP_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDrafting:
    """What drafting cost in an engine, and the fate of the drafts by kind of prompts."""

    cost: DraftingCost
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


def measure_live(
    name: str,
    target: LoadedTarget,
    settings: EngineSettings,
    config: Mapping[str, Any],
    texts: Sequence[RecordedText],
    *,
    num_tokens: int = NUM_TOKENS,
    progress: Progress = no_progress,
) -> LiveDrafting:
    """Answer recorded prompts again with a configuration, in batches of different sizes.

    Drafts have the greatest length in every step, so that cost is measured over all of them, and acceptance at
    every place.

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
    llm = make_engine(name, target, settings, config, num_sequences=max(BATCH_SIZES), longest=longest)
    limit = llm.speculative.num_speculative_tokens
    stats: dict[str, SpeculationStats] = {}
    drafted: list[int] = []
    seconds: list[float] = []
    kinds: dict[str, list[RecordedText]] = {}
    for text in texts:
        kinds.setdefault(text.kind, []).append(text)
    for size in BATCH_SIZES:
        for kind, of_kind in kinds.items():
            progress(f"{name}: {kind}, {size} at once")
            observed = ObservedExecutor(llm.engine.parts.executor)
            engine = Engine(
                replace(llm.engine.parts, executor=observed, control=FixedLength(num_speculative_tokens=limit))
            )
            for number, text in enumerate(of_kind[:size]):
                sampling = SamplingParams(
                    temperature=text.temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False, seed=number
                )
                engine.add_request(f"{kind}-{size}-{number}", text.prompt_ids, sampling, cache_salt=f"{size}")
            while engine.has_work:
                engine.step()
            steps = [step for step in observed.steps[NUM_WARMUP_STEPS:] if not step.num_prompts and step.num_drafted]
            drafted += [step.num_drafted for step in steps]
            seconds += [step.draft_seconds for step in steps]
            stats.setdefault(kind, SpeculationStats()).add(engine.stats.speculation)
    # a drafter that found nothing to say in these texts costs about nothing
    cost = DraftingCost.fit(drafted, seconds) if seconds else DraftingCost()
    return LiveDrafting(cost=cost, stats=stats, num_speculative_tokens=limit, method=llm.speculative.method)
