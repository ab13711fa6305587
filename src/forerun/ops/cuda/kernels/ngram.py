"""N-gram drafts from the device's own table; `ops.cuda.ngram` is the twin and says what is drafted.

No index: each place of the text is compared with its end, which reads the text once. Programs share out the places; the best
of each is one integer, so the best of all needs no order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.ops.cuda import ngram as twin
from forerun.ops.cuda.table import DeviceTable

PLACES_PER_PROGRAM = 4096
BLOCK = 512

_LONGEST_MATCH = tl.constexpr(twin.LONGEST_MATCH)


@triton.jit
def _find(
    tokens, lengths, slots, best, L, NUM_PARTS: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr,
    PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best match of a part of the text: suffix << 48 | place << 8 | match, or 0."""
    n, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + n).to(tl.int64)
    found = tl.full((), 0, tl.int64)
    if slot >= 0:
        text, length = tokens + slot * L, tl.load(lengths + slot)
        first, end = part * PLACES, tl.minimum((part + 1) * PLACES, length)
        while first < end:
            place = first + tl.arange(0, BLOCK)
            goes_on = (place > 0) & (place < end)
            match = tl.zeros((BLOCK,), tl.int32)
            for i in range(_LONGEST_MATCH):
                goes_on = goes_on & (place > i)
                last = tl.load(text + length - 1 - i, length > i, -1)
                goes_on = goes_on & (tl.load(text + place - 1 - i, goes_on, -1) == last)
                match += goes_on.to(tl.int32)
            suffix = tl.minimum(match, LONGEST).to(tl.int64)
            packed = (suffix << 48) | (place.to(tl.int64) << 8) | match.to(tl.int64)
            found = tl.maximum(found, tl.max(tl.where(suffix >= SHORTEST, packed, 0), 0))
            first += BLOCK
    tl.store(best + n * NUM_PARTS + part, found)


@triton.jit
def _copy(
    tokens, lengths, slots, limits, draft_lengths, best, draft_tokens, draft_parents, draft_sizes,
    L, K, NUM_PARTS: tl.constexpr, PARTS: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    slot = tl.load(slots + n).to(tl.int64)
    if slot >= 0:
        parts = tl.arange(0, PARTS)
        found = tl.max(tl.load(best + n * NUM_PARTS + parts, parts < NUM_PARTS, 0), 0)
        match, place = (found & 0xFF).to(tl.int32), ((found >> 8) & 0xFFFFFFFF).to(tl.int32)
        num_tokens = tl.minimum(tl.load(draft_lengths + match - 1, match > 0, 0), tl.load(limits + n))
        i = tl.arange(0, K_BLOCK)
        period = tl.maximum(tl.load(lengths + slot) - place, 1)
        token = tl.load(tokens + slot * L + place + i % period, i < num_tokens, 0)
        tl.store(draft_tokens + slot * K + i, token, i < num_tokens)
        tl.store(draft_parents + slot * K + i, i - 1, i < num_tokens)
        tl.store(draft_sizes + slot, num_tokens)


def propose(
    table: DeviceTable, slots: Tensor, limits: Tensor, draft_lengths: Tensor, *, shortest: int, longest: int
) -> None:
    """Draft what followed the latest occurrence of the text's longest known suffix; see `ops.cuda.ngram.propose`.

    Args:
        table: tokens and lengths are read; the draft, a chain, is written.
        slots: [N] int32, -1: padding.
        limits: [N] int32, most tokens of the draft; at most K.
        draft_lengths: [LONGEST_MATCH] int32; entry i: tokens of the draft after a match of i + 1 tokens.
        shortest: tokens of the shortest suffix that counts as a match.
        longest: tokens of the longest suffix that is told apart from a shorter one; at most LONGEST_MATCH.
    """
    num_sequences, (_, max_length) = len(slots), table.tokens.shape
    most_drafted = table.draft_tokens.shape[1]
    num_parts = triton.cdiv(max_length, PLACES_PER_PROGRAM)
    best = torch.empty((num_sequences, num_parts), dtype=torch.int64, device=slots.device)
    _find[(num_sequences, num_parts)](
        *(table.tokens, table.lengths, slots, best, max_length),
        NUM_PARTS=num_parts,
        SHORTEST=shortest,
        LONGEST=longest,
        PLACES=PLACES_PER_PROGRAM,
        BLOCK=min(BLOCK, triton.next_power_of_2(max_length)),
    )
    _copy[(num_sequences,)](
        *(table.tokens, table.lengths, slots, limits, draft_lengths, best),
        *(table.draft_tokens, table.draft_parents, table.draft_sizes, max_length, most_drafted),
        NUM_PARTS=num_parts,
        PARTS=triton.next_power_of_2(num_parts),
        K_BLOCK=triton.next_power_of_2(most_drafted),
        num_warps=1,
    )
