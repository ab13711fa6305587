"""Turns what the executor found into committed tokens: stop rules, text, log probabilities, the KV that stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.core.draft import Draft
from forerun.core.outputs import Logprob, Origin, StreamDelta, TokenLogprobs
from forerun.core.stats import PREDICTION, PredictionCounts
from forerun.core.step import PlannedSequence, RowLogprobs, SequenceResult
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


TokenText = Callable[[int], str | None]
"""A token's text, or None where it has none."""


def commit(
    generation: Generation, planned: PlannedSequence, result: SequenceResult, *, token_text: TokenText
) -> Committed | None:
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
        generation.error_kind = result.error_kind
    elif result.token_ids:
        committed = _append_tokens(generation, draft, result)
        generation.stats.record(draft, result.accepted)
        if generation.prediction is not None and draft.source == PREDICTION:
            _count_prediction(generation.prediction, committed)
        if result.logprobs is not None:
            _append_logprobs(generation, result.logprobs, committed.token_ids, token_text)
        tail += committed.token_ids[: len(result.accepted)]
    if planned.reaches_end and result.is_decided:
        generation.draft, generation.asked_limit = result.draft, planned.draft_limit
    if has_kv:
        _commit_kv(generation, planned, result, tail)
    return committed


def _append_logprobs(
    generation: Generation, found: RowLogprobs, token_ids: Sequence[int], token_text: TokenText
) -> None:
    rows = describe_logprobs(found, token_ids, token_text=token_text)
    generation.logprobs += rows
    generation.cumulative_logprob += sum(row[t].logprob for row, t in zip(rows, token_ids, strict=True))


def _commit_kv(generation: Generation, planned: PlannedSequence, result: SequenceResult, token_ids: list[int]) -> None:
    """Charge the KV of the tokens that stand, and give back the places that no step in flight writes to."""
    if result.error is None:
        is_undecided = planned.reaches_end and not result.is_decided  # then the newest token is computed again
        generation.table.commit(token_ids[:-1] if is_undecided else token_ids)
    later = generation.in_flight
    generation.table.release_surplus(0 if later is None else max(0, later.end - generation.table.num_computed))


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
    origins = origins_of(draft, accepted)
    if num_kept < len(token_ids):
        token_ids, origins = token_ids[:num_kept], origins[:num_kept]
    generation.origins += origins
    return Committed(generation, draft, accepted, token_ids, origins)


def origins_of(draft: Draft, accepted: Sequence[int]) -> list[Origin]:
    """How the tokens of a step came to be that accepted these nodes of its draft, the target's own included."""
    own = Origin.BONUS if draft.is_leaf(accepted[-1] if accepted else -1) else Origin.RECOVERED
    return [*([Origin.ACCEPTED] * len(accepted)), own]


def _count_prediction(counts: PredictionCounts, done: Committed) -> None:
    """Count a draft that was taken from the request's prediction."""
    num_accepted = done.origins.count(Origin.ACCEPTED)
    counts.num_accepted_tokens += num_accepted
    counts.num_rejected_tokens += len(done.draft.token_ids) - num_accepted


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


def describe_logprobs(found: RowLogprobs, token_ids: Sequence[int], *, token_text: TokenText) -> list[TokenLogprobs]:
    """The logprobs of `token_ids` and of the most likely tokens beside them, row by row.

    Args:
        found: what the executor reports of at least as many rows as there are tokens.
        token_ids: the token taken at each row.
        token_text: gives a token's text, or None where it has none.
    """
    described = []
    for row, token_id in enumerate(token_ids):
        entries: TokenLogprobs = {token_id: Logprob(found.chosen[row], found.ranks[row], token_text(token_id))}
        for rank, (some_id, value) in enumerate(zip(found.top_ids[row], found.top_values[row], strict=True), start=1):
            if some_id not in entries:
                entries[some_id] = Logprob(value, rank, token_text(some_id))
        described.append(entries)
    return described


def _token_drafters(done: Committed) -> list[str | None]:
    """Who drafted each token; for the target's own the draft's first drafter."""
    found = [done.draft.source_of(node) for node in done.accepted] + [done.draft.source]
    return found[: len(done.token_ids)]


def delta(
    generation: Generation, done: Committed | None, *, prompt_logprobs: list[TokenLogprobs | None] | None = None
) -> StreamDelta:
    """What a step added to a completion; None: it ends without anything."""
    token_ids = done.token_ids if done else []
    draft = done.draft if done else None
    return StreamDelta(
        request_id=generation.request_id,
        index=generation.index,
        text=generation.text.take_delta(finished=generation.finished) if generation.text is not None else "",
        token_ids=token_ids,
        origins=done.origins if done else [],
        logprobs=generation.logprobs[len(generation.logprobs) - len(token_ids) :] if generation.logprobs else None,
        prompt_logprobs=prompt_logprobs,
        drafter=draft.source if draft else None,
        num_drafted_by=draft.num_drafted_by() if draft else {},
        token_drafters=_token_drafters(done) if done else [],
        num_draft_tokens=len(draft.token_ids) if draft else 0,
        num_accepted_tokens=len(done.accepted) if done else 0,
        finish_reason=generation.finish_reason,
        stop_reason=generation.stop_reason,
    )
