"""Turns verdicts into committed tokens: stop rules, text, and the KV that stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from forerun.core.verdict import Origin, Verdict
from forerun.engine.generation import Generation, Work
from forerun.kv.cache import KVCache


@dataclass(slots=True)
class Committed:
    """What one step added to one generation.

    `first_row` is the row of the logits that follows the last token committed before. `accepted` are
    the draft's nodes that the verifier accepted, those that a stop rule then cut included: it
    measures the drafts. None where there was nothing to judge.
    """

    work: Work
    first_row: int
    accepted: tuple[int, ...] | None = None
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)

    @property
    def logits_rows(self) -> list[int]:
        """The row that chose each of `token_ids`."""
        nodes = (-1, *(self.accepted or ()))
        return [self.first_row + 1 + node for node in nodes[: len(self.token_ids)]]


def commit_step(
    works: Sequence[Work], first_rows: Sequence[int], verdicts: Sequence[Verdict | None], cache: KVCache
) -> list[Committed]:
    """Commit a step: accepted tree paths become contiguous, tokens are appended, surplus KV goes back.

    `verdicts[i]` is None for a work that had nothing to judge (a prompt chunk before the last), or that
    the verifier left undecided: the next step then computes its last token again.
    """
    _compact_accepted_paths(works, verdicts, cache)
    return [_commit(work, row, verdict) for work, row, verdict in zip(works, first_rows, verdicts, strict=True)]


def _compact_accepted_paths(works: Sequence[Work], verdicts: Sequence[Verdict | None], cache: KVCache) -> None:
    """Move the KV of accepted nodes to the places right after the tail, where a chain's already are."""
    sources: list[int] = []
    destinations: list[int] = []
    for work, verdict in zip(works, verdicts, strict=True):
        if work.draft.parents is None or verdict is None or verdict.accepted == tuple(range(len(verdict.accepted))):
            continue
        places = work.generation.slot.slots(work.start + work.num_tail, len(work.draft))
        sources += (places[node] for node in verdict.accepted)
        destinations += places[: len(verdict.accepted)]
    if sources:
        device = cache.layers[0].key.device
        cache.move(torch.tensor(sources, device=device), torch.tensor(destinations, device=device))


def _commit(work: Work, first_row: int, verdict: Verdict | None) -> Committed:
    generation = work.generation
    committed = Committed(work, first_row)
    tail = generation.sequence.tokens_between(work.start, work.start + work.num_tail)
    if verdict is None:
        generation.slot.commit(tail[:-1] if work.reaches_end else tail)
    elif verdict.error is not None:
        generation.finish("error", verdict.error)
    else:
        committed.accepted = verdict.accepted
        accepted = [work.draft.token_ids[node] for node in verdict.accepted]
        _append_tokens(committed, [*accepted, verdict.token_id])
        generation.slot.commit(tail + accepted[: len(committed.token_ids)] if accepted else tail)
        generation.stats.record(work.draft, verdict.accepted)
    generation.slot.release_surplus()
    return committed


def _append_tokens(committed: Committed, token_ids: list[int]) -> None:
    """Append the accepted path and the target's own token, up to the first one that ends the text."""
    draft, generation, accepted = committed.work.draft, committed.work.generation, committed.accepted
    output_ids = generation.sequence.output_ids
    num_before = len(output_ids)
    for token_id in token_ids:
        output_ids.append(token_id)
        _apply_stop_rules(generation, token_id)
        if generation.finish_reason is not None:
            break
    num_kept = len(output_ids) - num_before
    own = Origin.BONUS if draft.is_leaf(accepted[-1] if accepted else -1) else Origin.RECOVERED
    committed.token_ids = token_ids[:num_kept]
    committed.origins = [*([Origin.ACCEPTED] * (len(token_ids) - 1)), own][:num_kept]
    generation.origins += committed.origins


def _apply_stop_rules(generation: Generation, token_id: int) -> None:
    """End the generation if `token_id`, just appended, ends it; a stop token's text is not shown."""
    sequence, sampling = generation.sequence, generation.sequence.sampling
    stops_count = len(sequence.output_ids) >= sampling.min_tokens
    is_stop_token = stops_count and token_id in generation.stop_tokens
    if generation.text is not None and (not is_stop_token or sampling.include_stop_str_in_output):
        stop = generation.text.push(token_id, stops_count=stops_count)
        if stop is not None:
            generation.finish("stop", stop)
    if is_stop_token:
        generation.finish("stop", generation.stop_tokens[token_id])
    elif len(sequence) >= generation.max_length:
        generation.finish("length")
