"""Drawing the target's own token at every row; `ops.cuda.sampling` is the twin and says what is drawn.

Four passes over the logits, all but one shared out over the vocabulary: the largest; where top-k and top-p end; the race; its
winner. What crosses programs are maxima and sums of integers, so no order of them matters, and no result depends on how many
rows there are. `_find_floor` selects by radix, four bits of the order key at a time: the sixteen sums of a digit's tokens say
which digit the last kept token has. Weights are whole numbers, so a sum of them is exact.

Few tokens can win the race, since noise is never below the uniform number it is made from. A block without any such token
computes no logarithm (see `ops.race`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.ops.cuda.kernels.noise import EXACT, key_value, order_key, row_key, score, uniform, weight
from forerun.ops.cuda.table import RuleTable, StepRows

BLOCK = 1024
TOKENS_PER_PROGRAM = 4096

_MARGIN = tl.constexpr(1.001)  # above the error of the approximate comparison
_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _largest_of(partial, row, NUM_PARTS: tl.constexpr, PARTS: tl.constexpr):
    """The row's largest logit as (order key << 32 | inverted id)."""
    parts = tl.arange(0, PARTS)
    return tl.max(tl.load(partial + row * NUM_PARTS + parts, parts < NUM_PARTS, -0x8000000000000000), 0)


@triton.jit
def _find_largest(logits, slots, partial, V, NUM_PARTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(slots + row) >= 0:
        best = tl.full((), -0x8000000000000000, tl.int64)
        for first in range(part * TOKENS, tl.minimum((part + 1) * TOKENS, V), BLOCK):
            ids = first + tl.arange(0, BLOCK)
            values = tl.load(logits + row.to(tl.int64) * V + ids, ids < V, float("-inf"))
            packed = (order_key(values).to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))
            best = tl.maximum(best, tl.max(tl.where(ids < V, packed, -0x8000000000000000), 0))
        tl.store(partial + row * NUM_PARTS + part, best)


@triton.jit
def _shifted(logits, row, ids, V, largest, temperature):
    """Logits after temperature, the largest 0; -inf beyond the vocabulary."""
    values = tl.load(logits + row.to(tl.int64) * V + ids, ids < V, float("-inf"))
    return tl.div_rn(values - largest, tl.zeros_like(values) + temperature)


@triton.jit
def _select(logits, row, V, largest, temperature, floor, wanted, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key such that the tokens at or above it reach `wanted`, and what the tokens above it sum up to.

    Each token of at least `floor` counts as one, or by its weight. Keys are unsigned, in an int64.
    """
    prefix = tl.full((), 0, tl.int64)
    above = tl.full((), 0, tl.int64)
    digits = tl.arange(0, 16)
    for place in range(7, -1, -1):
        sums = tl.zeros((16,), tl.int64)
        for first in range(0, V, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            values = _shifted(logits, row, ids, V, largest, temperature)
            keys = order_key(values).to(tl.int64) + 0x80000000
            amounts = weight(values) if BY_WEIGHT else tl.full((BLOCK,), 1, tl.int64)
            counts = (ids < V) & (values >= floor) & ((keys >> (4 * place + 4)) == prefix)
            amounts = tl.where(counts, amounts, 0)
            digit = (keys >> (4 * place)) & 15
            sums += tl.sum(tl.where(digit[:, None] == digits[None, :], amounts[:, None], 0), 0)
        up_to = above + tl.sum(sums, 0) - tl.cumsum(sums, 0)  # those above each digit
        chosen = tl.max(tl.where(up_to + sums >= wanted, digits, 0), 0)
        above = tl.sum(tl.where(digits == chosen, up_to, 0), 0)
        prefix = prefix * 16 + chosen.to(tl.int64)
    return prefix, above


@triton.jit
def _find_floor(
    logits, slots, partial, floors, top_ks, top_ps, temperatures, kept_floor, kept_ties,
    V, NUM_PARTS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where min-p, top-k and top-p end: the least logit that stays, and the last token id that stays among equal ones."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        temperature = tl.load(temperatures + slot)
        largest = key_value((_largest_of(partial, row, NUM_PARTS, PARTS) >> 32).to(tl.int32))
        top_k, top_p = tl.load(top_ks + slot).to(tl.int64), tl.load(top_ps + slot)
        floor = tl.load(floors + slot)
        last_id = tl.full((), _NO_ID, tl.int32)
        if (temperature > 0.0) & (tl.abs(largest) < float("inf")):
            if (top_k > 0) & (top_k < V):
                key, _ = _select(logits, row, V, largest, temperature, float("-inf"), top_k, False, BLOCK)
                floor = tl.maximum(floor, key_value((key - 0x80000000).to(tl.int32)))
            if top_p < 1.0:
                total = tl.full((), 0, tl.int64)
                for first in range(0, V, BLOCK):
                    ids = first + tl.arange(0, BLOCK)
                    values = _shifted(logits, row, ids, V, largest, temperature)
                    total += tl.sum(tl.where((ids < V) & (values >= floor), weight(values), 0), 0)
                wanted = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
                wanted = tl.minimum(tl.maximum(wanted, 1), total)
                key, above = _select(logits, row, V, largest, temperature, floor, wanted, True, BLOCK)
                least = key_value((key - 0x80000000).to(tl.int32))
                one = weight(least)
                num_ties = (wanted - above + one - 1) // one
                seen = tl.full((), 0, tl.int64)
                for first in range(0, V, BLOCK):
                    ids = first + tl.arange(0, BLOCK)
                    ties = ((_shifted(logits, row, ids, V, largest, temperature) == least) & (ids < V)).to(tl.int64)
                    at = seen + tl.cumsum(ties, 0)
                    last_id = tl.minimum(last_id, tl.min(tl.where((ties == 1) & (at == num_ties), ids, _NO_ID), 0))
                    seen += tl.sum(ties, 0)
                floor = least
        tl.store(kept_floor + row, floor)
        tl.store(kept_ties + row, last_id)


@triton.jit
def _race(
    logits, slots, positions, partial, temperatures, seeds, kept_floor, kept_ties, scores, winners,
    V, NUM_PARTS: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best score among a part of the vocabulary, and whose it is."""
    row, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        temperature = tl.load(temperatures + slot)
        largest = key_value((_largest_of(partial, row, NUM_PARTS, PARTS) >> 32).to(tl.int32))
        if (temperature > 0.0) & (tl.abs(largest) < float("inf")):
            key = row_key(tl.load(seeds + slot), tl.load(positions + row) + 1)
            floor, last_id = tl.load(kept_floor + row), tl.load(kept_ties + row)
            best = tl.full((), float("-inf"), tl.float64)
            winner = tl.full((), _NO_ID, tl.int32)
            latest = tl.full((), float("inf"), tl.float32)
            for first in range(part * TOKENS, tl.minimum((part + 1) * TOKENS, V), BLOCK):
                ids = first + tl.arange(0, BLOCK)
                values = _shifted(logits, row, ids, V, largest, temperature)
                kept = (ids < V) & ((values > floor) | ((values == floor) & (ids <= last_id)))
                noise = uniform(key, ids)
                # noise lies between u and u / (1 - u)
                earliest = tl.where(kept, noise.to(tl.float32) * tl.exp(-values), float("inf"))
                latest = tl.minimum(latest, tl.min(earliest / (1.0 - noise).to(tl.float32), 0))
                if tl.min(earliest, 0) <= latest * _MARGIN:
                    block_scores = tl.where(kept, score(values, noise), float("-inf"))
                    block_best = tl.max(block_scores, 0)
                    if block_best > best:
                        best = block_best
                        winner = tl.min(tl.where(block_scores == block_best, ids, _NO_ID), 0)
            tl.store(scores + row * NUM_PARTS + part, best)
            tl.store(winners + row * NUM_PARTS + part, winner)


@triton.jit
def _choose(
    slots, partial, temperatures, scores, winners, token_ids, largest_out, COUNT,
    NUM_PARTS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot >= 0:
        packed = _largest_of(partial, row, NUM_PARTS, PARTS)
        largest = key_value((packed >> 32).to(tl.int32))
        token_id = (0xFFFFFFFF - (packed & 0xFFFFFFFF)).to(tl.int32)
        if tl.abs(largest) < float("inf"):
            if tl.load(temperatures + slot) > 0.0:
                parts = tl.arange(0, PARTS)
                at = row * NUM_PARTS + parts
                part_scores = tl.load(scores + at, parts < NUM_PARTS, float("-inf"))
                part_winners = tl.load(winners + at, parts < NUM_PARTS, _NO_ID)
                best = tl.max(part_scores, 0)
                token_id = tl.min(tl.where(part_scores == best, part_winners, _NO_ID), 0)
                token_id = tl.where(best == float("-inf"), -1, token_id)  # nobody runs
        else:
            token_id = -1
        tl.store(token_ids + row * COUNT, token_id)
        tl.store(largest_out + row, largest)


def sample(logits: Tensor, rows: StepRows, rules: RuleTable, token_ids: Tensor, largest: Tensor) -> None:
    """Draw the token after each row by the rules of its sequence; see `ops.cuda.sampling.sample`.

    Args:
        logits: [T, V] fp32, contiguous, all edits made.
        rows: `slots` and `positions` are read.
        rules: of each slot.
        token_ids: [T] int32, written; -1 where the largest logit is not finite.
        largest: [T] fp32, written: the largest logit, NaN where the row holds any. Padding rows are left as they are.
    """
    _draw(logits, rows, rules, token_ids[:, None], largest)


def sample_first(logits: Tensor, rows: StepRows, rules: RuleTable, token_ids: Tensor) -> None:
    """Find the first tokens of each row's race, the winner first; see `ops.cuda.sampling.sample_first`.

    Args:
        logits: [T, V] fp32, contiguous; changed.
        rows: `slots` and `positions` are read.
        rules: of each slot.
        token_ids: [T, count] int32, contiguous, written; -1 where fewer tokens have a chance. What the rows of greedy sequences
            get means nothing. Padding rows are left as they are.
    """
    _draw(logits, rows, rules, token_ids, torch.empty(len(logits), device=logits.device))


def _draw(logits: Tensor, rows: StepRows, rules: RuleTable, token_ids: Tensor, largest: Tensor) -> None:
    """Draw [T, count] tokens: one race for each, where who has won does not run again, and all else is as it was."""
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, TOKENS_PER_PROGRAM)
    parts = triton.next_power_of_2(num_parts)
    block = min(BLOCK, triton.next_power_of_2(vocab_size))

    def scratch(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)

    partial, winners = scratch(torch.int64, num_parts), scratch(torch.int32, num_parts)
    scores = scratch(torch.float64, num_parts)
    kept_floor, kept_ties = scratch(torch.float32), scratch(torch.int32)
    shared, shape = (num_rows, num_parts), {"NUM_PARTS": num_parts, "PARTS": parts}
    _find_largest[shared](
        logits, rows.slots, partial, vocab_size, NUM_PARTS=num_parts, TOKENS=TOKENS_PER_PROGRAM, BLOCK=block
    )
    _find_floor[(num_rows,)](
        *(logits, rows.slots, partial, rules.floor, rules.top_k, rules.top_p, rules.temperature, kept_floor, kept_ties),
        *(vocab_size,),
        BLOCK=block,
        num_warps=16,  # a digit's sums are 16 times a block: with fewer warps they do not fit into the registers
        **shape,
        **EXACT,
    )
    for place in range(token_ids.shape[1]):
        if place:
            won = token_ids[:, place - 1 : place].long().clamp(0, vocab_size - 1)
            logits.scatter_(1, won, -torch.inf)
        _race[shared](
            *(logits, rows.slots, rows.positions, partial, rules.temperature, rules.seeds, kept_floor, kept_ties),
            *(scores, winners, vocab_size),
            TOKENS=TOKENS_PER_PROGRAM,
            BLOCK=block,
            **shape,
            **EXACT,
        )
        _choose[(num_rows,)](
            *(rows.slots, partial, rules.temperature, scores, winners),
            *(token_ids[:, place], largest, token_ids.stride(0)),
            **shape,
        )
