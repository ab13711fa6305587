"""N-gram drafts from the device's own table, by formula: the twin of `kernels.ngram`, with the drafts of `drafters.ngram`."""

from __future__ import annotations

from torch import Tensor

from forerun.ops.cuda.table import DeviceTable

LONGEST_MATCH = 32
"""Tokens of a match that are counted: `drafters.ngram.LONGEST_MATCH`."""


def propose(
    table: DeviceTable, slots: Tensor, limits: Tensor, draft_lengths: Tensor, *, shortest: int, longest: int
) -> None:
    """Draft for each sequence what followed the latest occurrence of the text's longest suffix that occurred before.

    Args:
        table: tokens and lengths are read; the draft, a chain, is written.
        slots: [N] int32, -1: padding.
        limits: [N] int32, most tokens of the draft; at most K.
        draft_lengths: [LONGEST_MATCH] int32; entry i: tokens of the draft after a match of i + 1 tokens.
        shortest: tokens of the shortest suffix that counts as a match.
        longest: tokens of the longest suffix that is told apart from a shorter one; at most LONGEST_MATCH.
    """
    for n, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        tokens = table.tokens[slot, : int(table.lengths[slot])].tolist()
        matches = [
            (min(match, longest), place, match) for place in range(1, len(tokens)) if (match := _match(tokens, place))
        ]
        length, place, match = max(matches, default=(0, 0, 0))
        num_tokens = min(int(draft_lengths[match - 1]), int(limits[n])) if length >= shortest else 0
        for i in range(num_tokens):
            table.draft_tokens[slot, i] = tokens[place + i % (len(tokens) - place)]
            table.draft_parents[slot, i] = i - 1
        table.draft_sizes[slot] = num_tokens


def _match(tokens: list[int], place: int) -> int:
    """How many tokens before `place` equal those before the end; at most LONGEST_MATCH."""
    length = 0
    while length < min(place, LONGEST_MATCH) and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
