"""Log probabilities in the form that outputs carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from forerun.core.outputs import Logprob, TokenLogprobs
from forerun.ops.sampling import token_logprobs


def describe_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: int, *, token_text: Callable[[int], str | None]
) -> list[TokenLogprobs]:
    """The target's logprobs of `token_ids` and of the `num_top` most likely tokens, row by row.

    Args:
        logits: [R, vocab_size] the target's raw logits (before any sampling rule, as in vLLM).
        token_ids: the token taken at each row.
        num_top: how many of the most likely tokens to add; -1 for the whole vocabulary.
        token_text: gives a token's text, or None where it has none.
    """
    if not token_ids:
        return []
    found = token_logprobs(logits, token_ids, logits.shape[-1] if num_top < 0 else num_top)
    described = []
    for row, token_id in enumerate(token_ids):
        entries: TokenLogprobs = {}
        chosen = (token_id, found.chosen[row], found.ranks[row])
        tops = zip(
            found.top_ids[row],
            found.top_values[row],
            range(1, num_top + 1 if num_top >= 0 else logits.shape[-1] + 1),
            strict=True,
        )
        for some_id, value, rank in (chosen, *tops):
            if some_id not in entries:
                entries[some_id] = Logprob(value, rank, token_text(some_id))
        described.append(entries)
    return described
