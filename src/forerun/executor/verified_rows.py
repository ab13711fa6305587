"""What drafters learn from a step: its rows with logits, and what the target found there."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listing

import numpy as np
import numpy.typing as npt

from forerun.core.draft import Draft
from forerun.core.sequence import Sequence
from forerun.core.step import PlannedSequence, Rows
from forerun.drafters.base import VerifiedRows


def verified_rows(
    planned: Listing[PlannedSequence],
    sequences: Listing[Sequence],
    drafts: Listing[Draft],
    rows: Rows,
    *,
    candidate_ids: npt.NDArray[np.int32],
    candidate_logits: npt.NDArray[np.float32],
) -> VerifiedRows:
    """Describe the rows of a step whose logits were computed.

    Args:
        planned: the step's sequences.
        sequences: the tokens of each; those before its first row must be there.
        drafts: the draft that each one's rows end with.
        rows: the rows of all sequences, packed.
        candidate_ids: [R, k], the likeliest next tokens of each row with logits.
        candidate_logits: [R, k], their logits.
    """
    token_ids = rows.token_ids
    # in a packed batch the token before a row's is that of the row before it, but for these:
    previous = [-1, *token_ids[:-1]]
    for one, sequence, draft, first in zip(planned, sequences, drafts, rows.first_rows, strict=True):
        if first < len(previous):  # a sequence that ended while it was pending has no rows
            previous[first] = sequence.tokens_between(one.start - 1, one.start)[0] if one.start else -1
        if draft.parents is not None:
            root = first + one.num_tail - 1
            for node, parent in enumerate(draft.parents):
                previous[root + 1 + node] = token_ids[root + 1 + parent]
    if len(rows.logits_rows) < len(token_ids):
        token_ids = [token_ids[row] for row in rows.logits_rows]
        previous = [previous[row] for row in rows.logits_rows]
    return VerifiedRows(
        token_ids=np.array(token_ids, dtype=np.int64),
        previous_ids=np.array(previous, dtype=np.int64),
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
