"""Records the drafts of an engine's drafter."""

from __future__ import annotations

from tests.engines import engine_of


def recorded(llm):
    """The list to which the engine's drafter will append each draft, as (committed text, `Draft`)."""
    seen = []
    drafter = engine_of(llm).drafting.drafter
    propose = drafter.propose

    def spy(context):
        drafts = propose(context)
        for request, draft in zip(context.requests, drafts, strict=True):
            seen.append((tuple(request.sequence.tokens_from(0)), draft))
        return drafts

    drafter.propose = spy
    return seen


def recorded_under_pressure(llm, prompts, sampling):
    """The recorded drafts for prompts that were answered before, while sequences are preempted and prefixes found."""
    llm.generate(prompts, sampling, use_tqdm=False)
    seen = recorded(llm)
    llm.generate(prompts, sampling, use_tqdm=False)
    scheduler = engine_of(llm).scheduler
    assert scheduler.num_preemptions > 0
    assert scheduler.num_cached_tokens > 0
    return seen


def recorded_on_device(llm):
    """The list to which each draft that the engine's device makes will be appended, as (committed text, `Draft`)."""
    seen = []
    slots = llm.executor.slots
    know_text = slots.know_text

    def spy(holder, *, num_computed, draft):
        if draft.token_ids:
            seen.append((tuple(holder.sequence.tokens_from(0)), draft))
        know_text(holder, num_computed=num_computed, draft=draft)

    slots.know_text = spy
    return seen
