"""Runs a drafter over recorded texts, token by token, and keeps what it would draft at every place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.bench.instruments import Progress, no_progress
from forerun.bench.recording import RecordedText, Recording
from forerun.bench.replay import RecordedTarget, rows_on_path, standing_nodes
from forerun.config.speculative_config import resolve_speculative
from forerun.core.sampling_params import SamplingParams
from forerun.core.sequence import Sequence as TokenSequence
from forerun.drafters.base import DraftRequest
from forerun.drafters.guard import GuardedDrafter
from forerun.engine.adaptive import LEAST_SURVIVAL
from forerun.errors import ConfigError, ForerunError
from forerun.plan.draft_trace import NOTHING, DraftTrace, TracedDraft, TracedText


def can_be_traced(config: Mapping[str, Any], vocab_size: int) -> bool:
    """Whether a configuration drafts from texts alone, so that no model must run for its trace."""
    try:
        _drafting(config, vocab_size, 64)
    except ForerunError:  # what else is wrong with it comes up where it is measured
        return False
    return True


def trace_drafts(
    name: str, config: Mapping[str, Any], recording: Recording, *, progress: Progress = no_progress
) -> DraftTrace:
    """What a configuration's drafter drafts at every place of every text, and what of it stands under matching.

    The drafter meets the texts one after the other, as an engine's does that serves one request at a time,
    and learns of each row that the text came to. It drafts as much as it ever may; shorter drafts are the
    first nodes of these.

    Args:
        name: of the configuration.
        config: speculative_config.
        recording: the texts.
        progress: is called with the state of the work.

    Raises:
        ForerunError: the configuration is wrong, or its drafter needs a model; the message names it.
    """
    longest = max(len(text.prompt_ids) + len(text.answer_ids) for text in recording.texts)
    try:
        drafting, method, limit = _drafting(config, recording.info.vocab_size, longest)
    except ForerunError as error:
        raise type(error)(f"{name}: {error}") from error
    texts = []
    for number, text in enumerate(recording.texts):
        progress(f"{name}: text {number + 1} of {len(recording.texts)}")
        texts.append(_trace_text(text, number, drafting, limit))
    return DraftTrace.of_texts(name, method, limit, texts)


def _drafting(config: Mapping[str, Any], vocab_size: int, longest: int) -> tuple[GuardedDrafter, str, int]:
    """The drafter, the method, and the most nodes of a draft."""
    speculative = resolve_speculative(config)
    if not speculative.num_speculative_tokens:
        raise ConfigError("nothing is drafted (num_speculative_tokens is 0); leave the configuration out")
    target = RecordedTarget(
        vocab_size=vocab_size, max_model_len=longest, num_speculative_tokens=speculative.num_speculative_tokens
    )
    drafting = GuardedDrafter(speculative.drafter.build(target), vocab_size=vocab_size)
    if drafting.drafter.needs:
        raise ConfigError("the drafter reads hidden states of the target, which are not recorded")
    return drafting, speculative.method, speculative.num_speculative_tokens


def _trace_text(text: RecordedText, number: int, drafting: GuardedDrafter, limit: int) -> TracedText:
    sequence = TokenSequence(
        seq_id=number,
        prompt_ids=text.prompt_ids,
        output_ids=[],
        sampling=SamplingParams(temperature=text.temperature),
        seed=number,
    )
    answer, drafts = text.answer_ids, [NOTHING]
    for place in range(1, len(answer)):
        rows = rows_on_path(text, sequence, 0, num_candidates=drafting.num_candidates)
        sequence.output_ids.append(answer[place - 1])
        if drafting.num_candidates:
            drafting.learn(rows)
        drafting.start(sequence)
        depth = min(limit, len(answer) - place - 1)
        if not depth:  # one place is the target's own token's
            drafts.append(NOTHING)
            continue
        (draft,) = drafting.propose([DraftRequest(sequence, limit, depth, min_survival=LEAST_SURVIVAL)], {})
        if not len(draft):
            drafts.append(NOTHING)
            continue
        drafts.append(
            TracedDraft(
                len(draft),
                None if draft.is_chain else draft.parents,
                draft.survival,
                draft.source,
                standing_nodes(draft, answer, place),
            )
        )
    if len(sequence.output_ids) < len(answer):
        sequence.output_ids += answer[len(sequence.output_ids) :]
    drafting.stop(sequence)
    return TracedText(kind=text.kind, num_prompt_tokens=len(text.prompt_ids), drafts=drafts)
