"""Traces a drafter on recorded texts: what it would draft at every place, and what of it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from forerun.bench.compare import make_engine
from forerun.bench.draft_walk import WALKED_AT_ONCE, DraftWalk, EnginePace
from forerun.bench.instruments import Progress, no_progress
from forerun.bench.recording import RecordedText, Recording
from forerun.bench.replay import standing_nodes
from forerun.build import profile_of
from forerun.config.settings import EngineSettings
from forerun.core.draft import Draft
from forerun.drafters.base import GoesByClock, computes_with_a_model
from forerun.engine.adaptive import LEAST_SURVIVAL
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.models.base import LoadedTarget
from forerun.plan.draft_trace import NOTHING, DraftTrace, TracedDraft, TracedText
from forerun.plan.step_times import StepTimeModel


def trace_drafts(
    name: str,
    config: Mapping[str, Any],
    recording: Recording,
    target: LoadedTarget,
    settings: EngineSettings,
    *,
    step_times: StepTimeModel | None = None,
    progress: Progress = no_progress,
) -> DraftTrace | None:
    """What a configuration's drafter drafts at every place of every text, and what of it stands.

    It drafts as much as it ever may; shorter drafts are the first nodes of these. See `DraftWalk`.

    Args:
        name: of the configuration.
        config: speculative_config.
        recording: the texts.
        target: the model that wrote them.
        settings: of an engine; KV memory follows from the texts.
        step_times: of steps, drafting left out. "auto" asks a drafter that computes for as long as that pays: its trace
            is what it does where one sequence is served. None: then it has none.
        progress: is called with the state of the work.

    Returns:
        The trace, or None where texts do not decide it: the verifier draws anew what stands, or the drafter goes by the
        clock, and nobody says how long steps take.

    Raises:
        ForerunError: the configuration (named in the message) is wrong or does not fit the target.
    """
    longest = max(len(text.prompt_ids) + len(text.answer_ids) for text in recording.texts)
    sized = replace(settings, max_num_seqs=WALKED_AT_ONCE, kv_cache_memory_bytes=None)
    llm = make_engine(name, target, sized, config, num_sequences=WALKED_AT_ONCE, longest=longest)
    speculative = llm.speculative
    if not speculative.num_speculative_tokens:
        raise ConfigError(f"{name}: nothing is drafted (num_speculative_tokens is 0); leave the configuration out")
    if not can_be_traced(llm, recording, knows_step_times=step_times is not None):
        return None
    pace = None
    if step_times is not None and isinstance(llm.executor.drafting.drafter, GoesByClock):
        pace = EnginePace(speculative.control(replace(profile_of(target), keeps_new=False)), step_times)
    walk = DraftWalk(
        llm=llm,
        pace=pace,
        min_survival=LEAST_SURVIVAL if speculative.is_adaptive else 0.0,
        progress=lambda line: progress(f"{name}: {line}"),
    )
    drafts = walk.drafts(list(zip(recording.texts, recording.seeds, strict=True)))
    texts = [_traced(text, found) for text, found in zip(recording.texts, drafts, strict=True)]
    return DraftTrace.of_texts(name, speculative.method, speculative.num_speculative_tokens, texts)


def can_be_traced(llm: LLM, recording: Recording, *, knows_step_times: bool) -> bool:
    """Whether texts decide what an engine drafts, with the time of a step where that is known, and what of it stands."""
    speculative, drafter = llm.speculative, llm.executor.drafting.drafter
    if not knows_step_times and isinstance(drafter, GoesByClock) and computes_with_a_model(drafter):
        return False
    return all(speculative.goes_by_text(text.temperature) for text in recording.texts)


def _traced(text: RecordedText, drafts: list[Draft]) -> TracedText:
    return TracedText(
        kind=text.kind,
        num_prompt_tokens=len(text.prompt_ids),
        drafts=[_traced_draft(draft, text, place) for place, draft in enumerate(drafts)],
    )


def _traced_draft(draft: Draft, text: RecordedText, place: int) -> TracedDraft:
    if not len(draft):
        return NOTHING
    return TracedDraft(
        len(draft),
        None if draft.is_chain else draft.parents,
        draft.survival,
        draft.source,
        standing_nodes(draft, text.answer_ids, place),
    )
