"""Log probabilities in the form that outputs carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.core.outputs import Logprob, TokenLogprobs
from forerun.core.step import RowLogprobs


def describe_logprobs(
    found: RowLogprobs, token_ids: Sequence[int], *, token_text: Callable[[int], str | None]
) -> list[TokenLogprobs]:
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
