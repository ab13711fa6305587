"""Turns what the executor found into committed tokens: stop rules, text, and the KV that stands."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.draft import Draft
from forerun.core.step import PlannedSequence, SequenceResult
from forerun.core.verdict import Origin
from forerun.engine.generation import Generation


@dataclass(slots=True)
class Committed:
    """What one step added to one completion.

    `draft` is what the step verified and `accepted` those of its nodes that the verifier accepted, what a stop
    rule then cut included: it measures the drafts.
    """

    generation: Generation
    draft: Draft
    accepted: tuple[int, ...]
    token_ids: list[int]
    origins: list[Origin]


def commit(generation: Generation, planned: PlannedSequence, result: SequenceResult) -> Committed | None:
    """Commit one sequence's part of a step; None where nothing was to be judged (a prompt chunk before the last).

    The draft that was verified gives way to the one that the executor made for the next step. A sequence that
    was preempted since the step was planned has no KV left to commit, but its tokens stand.
    """
    draft = generation.draft.first(planned.num_draft)
    has_kv = generation.table.num_blocks > 0
    start = generation.table.num_computed
    tail = generation.tokens_between(start, start + planned.num_tail) if has_kv else []
    committed = None
    if result.error is not None:
        generation.finish("error", result.error)
    elif result.token_ids:
        committed = _append_tokens(generation, draft, result)
        generation.stats.record(draft, result.accepted)
        tail += committed.token_ids[: len(result.accepted)]
    if planned.reaches_end:
        generation.draft = result.draft
    if has_kv:
        if result.error is None:
            generation.table.commit(tail)
        later = generation.in_flight
        generation.table.release_surplus(0 if later is None else max(0, later.end - generation.table.num_computed))
    return committed


def _append_tokens(generation: Generation, draft: Draft, result: SequenceResult) -> Committed:
    """Append the accepted path and the target's own token, up to the first one that ends the text."""
    accepted, token_ids = result.accepted, result.token_ids
    num_kept = 0
    if generation.text is None and not generation.spec.may_end(len(generation.output_ids), token_ids):
        generation.output_ids += token_ids
        num_kept = len(token_ids)
    else:
        for token_id in token_ids:
            generation.output_ids.append(token_id)
            num_kept += 1
            _apply_stop_rules(generation, token_id)
            if generation.finish_reason is not None:
                break
    own = Origin.BONUS if draft.is_leaf(accepted[-1] if accepted else -1) else Origin.RECOVERED
    origins = [*([Origin.ACCEPTED] * (len(token_ids) - 1)), own]
    if num_kept < len(token_ids):
        token_ids, origins = token_ids[:num_kept], origins[:num_kept]
    generation.origins += origins
    return Committed(generation, draft, accepted, token_ids, origins)


def _apply_stop_rules(generation: Generation, token_id: int) -> None:
    """End the completion if `token_id`, just appended, ends it; a stop token's text is not shown."""
    sampling, text = generation.spec.sampling, generation.text
    is_stop_token = token_id in generation.stop_tokens and len(generation.output_ids) >= sampling.min_tokens
    if text is not None and (not is_stop_token or sampling.include_stop_str_in_output):
        stop = text.push(token_id, stops_count=len(generation.output_ids) >= sampling.min_tokens)
        if stop is not None:
            generation.finish("stop", stop)
    if is_stop_token:
        generation.finish("stop", generation.stop_tokens[token_id])
    elif generation.num_tokens >= generation.spec.max_length:
        generation.finish("length")
