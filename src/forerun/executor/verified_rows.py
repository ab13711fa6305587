"""What drafters learn from a step: its rows with logits, and what the target found there."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Set
from collections.abc import Sequence as Listing

from forerun.core.batch import Candidates
from forerun.core.draft import Draft
from forerun.core.sequence import Sequence
from forerun.core.step import PlannedSequence, Rows
from forerun.drafters.base import VerifiedRows


def verified_rows(
    planned: Listing[PlannedSequence],
    sequences: Listing[Sequence],
    drafts: Listing[Draft],
    rows: Rows,
    candidates: Candidates,
    *,
    released: Set[int],
) -> VerifiedRows:
    """Describe the rows of a step whose logits were computed.

    Args:
        planned: the step's sequences.
        sequences: the tokens of each; those before its first row must be there, unless it was released.
        drafts: the draft that each one's rows end with.
        rows: the rows of all sequences, packed.
        candidates: the likeliest next tokens of each row with logits.
        released: ids of those sequences that have ended since the step began, and whose texts may be cut. What the
            target said is as true there, but nobody knows the token before the first row.
    """
    token_ids = rows.token_ids
    # in a packed batch the token before a row's is that of the row before it, but for these:
    previous = [-1, *token_ids[:-1]]
    for one, sequence, draft, first in zip(planned, sequences, drafts, rows.first_rows, strict=True):
        if first < len(previous):  # a sequence that ended while it was pending has no rows
            has_previous = one.start > 0 and one.seq_id not in released
            previous[first] = sequence.tokens_between(one.start - 1, one.start)[0] if has_previous else -1
        if draft.parents is not None:
            root = first + one.num_tail
            previous[root : root + len(draft.parents)] = [token_ids[root + parent] for parent in draft.parents]
    if len(rows.logits_rows) < len(token_ids):
        token_ids = [token_ids[row] for row in rows.logits_rows]
        previous = [previous[row] for row in rows.logits_rows]
    candidate_ids, candidate_logits = candidates.on_host()
    return VerifiedRows(
        token_ids=array("q", token_ids),
        previous_ids=array("q", previous),
        candidate_ids=candidate_ids,
        candidate_logits=candidate_logits,
        salts=list(_salts(sequences, rows)),
    )


def _salts(sequences: Listing[Sequence], rows: Rows) -> Iterator[tuple[int, int, str | None]]:
    """(first row with logits, the one behind the last, cache salt) of each sequence that has any."""
    ends = [*rows.first_prompt_logits[1:], len(rows.logits_rows)]
    for sequence, first, end in zip(sequences, rows.first_prompt_logits, ends, strict=True):
        if first < end:
            yield first, end, sequence.cache_salt
