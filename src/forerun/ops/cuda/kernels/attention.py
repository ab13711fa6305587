"""Attention of a step's rows over the paged cache; `ops.cuda.attention` is the twin and says what is computed.

A row's keys are taken in the order of their place in its text, in chunks, within a chunk in blocks of BLOCK_KEYS. Chunks
are cut by place alone (`chunk_of`). Each gives a maximum, a sum and weighted values; a second kernel joins them in order. So the order of a row's
sums is a function of its position alone: not of the rows beside it, of how the text was cut into steps, of whether its last
tokens were drafted as a chain or a tree, or of how long a text the engine has room for.

A program computes a tile of neighbouring rows for all query heads that share a key head, always in the same shape of matrix
product. Rows of one sequence share the keys they read, except where a tree's rows part; there each takes a turn of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.ops.cuda.attention import FIRST_CHUNKS, LEAST_CHUNK, chunk_of
from forerun.ops.cuda.table import StepRows

TILE = 16  # rows times heads of a tile, at least: the least shape of the tensor cores
BLOCK_KEYS = 64
ROWS_PER_LAUNCH = 256  # bounds the memory of the chunks' results
MOST_PROGRAMS = 2048  # of a launch; where there would be more, each computes several chunks


@triton.jit
def _chunk_of(place, LEAST: tl.constexpr, FIRST: tl.constexpr):
    """See `ops.cuda.attention.chunk_of`."""
    doublings = 0
    for i in tl.static_range(1, 18):  # until places leave 31 bits
        doublings += (place >= (LEAST * FIRST << i)).to(tl.int32)
    behind = FIRST + doublings * (FIRST // 2) + (place - (LEAST * FIRST << doublings)) // (LEAST << (doublings + 1))
    return tl.where(place < LEAST * FIRST, place // LEAST, behind)


@triton.jit
def _first_place(chunk, LEAST: tl.constexpr, FIRST: tl.constexpr):
    """Where a chunk begins."""
    doublings = tl.maximum(chunk - FIRST, 0) // (FIRST // 2)
    within = tl.maximum(chunk - FIRST, 0) % (FIRST // 2)
    behind = (LEAST * FIRST << doublings) + within * (LEAST << (doublings + 1))
    return tl.where(chunk < FIRST, chunk * LEAST, behind)


@triton.jit
def _capped(scores, SOFT_CAP: tl.constexpr):
    """soft_cap * tanh(scores / soft_cap)"""
    # where exp is finite; tanh is 1 long before
    doubled = tl.minimum(scores * (2.0 / SOFT_CAP), 80.0, propagate_nan=tl.PropagateNan.ALL)
    return SOFT_CAP * (1.0 - 2.0 / (tl.exp(doubled) + 1.0))


@triton.jit(do_not_specialize=["T", "D", "B", "num_chunks", "num_programs"])
def _attend_chunks(
    query, keys, values, part_values, part_max, part_sum,
    slots, positions, num_linear, path_slots, block_table,
    T, D, B, scale, window, num_hidden, num_chunks, num_programs,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, LEAST: tl.constexpr, FIRST: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    first_row, kv_head = tl.program_id(0) * TILE_ROWS, tl.program_id(1)
    GROUP_BLOCK: tl.constexpr = triton.next_power_of_2(GROUP)
    M: tl.constexpr = TILE_ROWS * GROUP_BLOCK
    members = tl.arange(0, M)
    own_row, head = first_row + members // GROUP_BLOCK, members % GROUP_BLOCK
    own_slot = tl.load(slots + own_row, own_row < T, -1)
    own_position = tl.load(positions + own_row, own_row < T, -1)
    is_member = (own_slot >= 0) & (head < GROUP)
    head = kv_head * GROUP + head
    num_places = tl.max(tl.where(is_member, own_position, -1), 0) + 1
    first_seen = num_hidden
    if HAS_WINDOW:
        first_seen = tl.maximum(num_hidden, tl.min(tl.where(is_member, own_position + 1 - window, 0x7FFFFFFF), 0))
    last_chunk = tl.where(first_seen < num_places, _chunk_of(tl.maximum(num_places - 1, 0), LEAST, FIRST), -1)
    first_chunk = _chunk_of(first_seen, LEAST, FIRST)
    own_chunk = first_chunk + (tl.program_id(2) + num_programs - first_chunk % num_programs) % num_programs
    for chunk in range(own_chunk, last_chunk + 1, num_programs):
        # Read anew for each chunk: kept over all of them they would not fit in a thread's registers.
        own_slot = tl.load(slots + own_row, own_row < T, -1)
        own_position = tl.load(positions + own_row, own_row < T, -1)
        is_member = (own_slot >= 0) & (members % GROUP_BLOCK < GROUP)
        first_place = _first_place(chunk, LEAST, FIRST)
        end = tl.minimum(num_places, _first_place(chunk + 1, LEAST, FIRST))
        dims, value_dims = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
        at_query = (own_row.to(tl.int64) * NUM_HEADS + head) * KEY_DIM
        q = tl.load(query + at_query[:, None] + dims[None, :], is_member[:, None] & (dims[None, :] < KEY_DIM), 0.0)
        highest = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        summed = tl.zeros((M, VALUE_BLOCK), tl.float32)
        # The tile reads its keys together unless its rows are of several sequences or part within the chunk.
        own_linear = tl.load(num_linear + own_row, is_member, 0)
        first_slot, last_slot = tl.min(tl.where(is_member, own_slot, 0x7FFFFFFF), 0), tl.max(own_slot, 0)
        parts = is_member & (own_linear <= own_position) & (own_linear < end)
        is_shared = (first_slot == last_slot) & (tl.max(parts.to(tl.int32), 0) == 0)
        for turn in range(tl.where(is_shared, 1, TILE_ROWS)):
            takes_part = is_member & (is_shared | (own_row == first_row + turn))
            slot = tl.max(tl.where(takes_part, own_slot, -1), 0).to(tl.int64)
            last = tl.max(tl.where(takes_part, own_position, -1), 0)
            linear = tl.where(is_shared, last + 1, tl.max(tl.where(takes_part, own_linear, 0), 0))
            path = path_slots + (first_row + turn).to(tl.int64) * D
            for begin in range(first_place, end, BLOCK_KEYS):
                if (begin <= last) & (begin + BLOCK_KEYS > first_seen):
                    place = begin + tl.arange(0, BLOCK_KEYS)
                    is_read = (place <= last) & (place >= num_hidden)
                    block = tl.load(block_table + slot * B + place // BLOCK_SIZE, is_read & (place < linear), 0)
                    at = block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE
                    apart = is_read & (place >= linear)
                    at = tl.where(apart, tl.load(path + (place - linear), apart, 0).to(tl.int64), at)
                    at = at * NUM_KV_HEADS + kv_head
                    k = tl.load(
                        keys + at[None, :] * KEY_DIM + dims[:, None], is_read[None, :] & (dims[:, None] < KEY_DIM), 0.0
                    )
                    scores = tl.dot(q, k, input_precision="ieee") * scale
                    if SOFT_CAP > 0:
                        scores = _capped(scores, SOFT_CAP)
                    sees = takes_part[:, None] & is_read[None, :] & (place[None, :] <= own_position[:, None])
                    if HAS_WINDOW:
                        sees = sees & (place[None, :] > own_position[:, None] - window)
                    scores = tl.where(sees, scores, float("-inf"))
                    higher = tl.maximum(highest, tl.max(scores, 1))
                    finite = tl.where(higher == float("-inf"), 0.0, higher)
                    weights = tl.exp(scores - finite[:, None])
                    shrink = tl.exp(highest - finite)
                    v = tl.load(
                        values + at[:, None] * VALUE_DIM + value_dims[None, :],
                        is_read[:, None] & (value_dims[None, :] < VALUE_DIM),
                        0.0,
                    )
                    added = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
                    summed = tl.where(takes_part[:, None], summed * shrink[:, None] + added, summed)
                    total = tl.where(takes_part, total * shrink + tl.sum(weights, 1), total)
                    highest = tl.where(takes_part, higher, highest)
        at_part = (own_row.to(tl.int64) * NUM_HEADS + head) * num_chunks + chunk
        tl.store(part_max + at_part, highest, is_member)
        tl.store(part_sum + at_part, total, is_member)
        at_value = at_part[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(part_values + at_value, summed, is_member[:, None] & (value_dims[None, :] < VALUE_DIM))


@triton.jit(do_not_specialize=["num_chunks"])
def _join_chunks(
    part_values, part_max, part_sum, output, slots, positions, sinks, window, num_hidden, num_chunks,
    NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, LEAST: tl.constexpr,
    FIRST: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(slots + row) >= 0:
        position = tl.load(positions + row)
        first_seen = num_hidden
        if HAS_WINDOW:
            first_seen = tl.maximum(num_hidden, position + 1 - window)
        dims = tl.arange(0, VALUE_BLOCK)
        highest = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        summed = tl.zeros((VALUE_BLOCK,), tl.float32)
        at = (row.to(tl.int64) * NUM_HEADS + head) * num_chunks
        for chunk in range(_chunk_of(first_seen, LEAST, FIRST), _chunk_of(position, LEAST, FIRST) + 1):
            other = tl.load(part_max + at + chunk)
            higher = tl.maximum(highest, other)
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            shrink, grow = tl.exp(highest - finite), tl.exp(other - finite)
            part = tl.load(part_values + (at + chunk) * VALUE_DIM + dims, dims < VALUE_DIM, 0.0)
            summed = summed * shrink + part * grow
            total = total * shrink + tl.load(part_sum + at + chunk) * grow
            highest = higher
        if HAS_SINKS:
            sink = tl.load(sinks + head)
            higher = tl.maximum(highest, sink)
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp(highest - finite)
            summed = summed * shrink
            total = total * shrink + tl.exp(sink - finite)
        result = (summed / total).to(output.dtype.element_ty)
        tl.store(output + (row.to(tl.int64) * NUM_HEADS + head) * VALUE_DIM + dims, result, dims < VALUE_DIM)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    rows: StepRows,
    block_table: Tensor,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    num_hidden: int = 0,
) -> None:
    """Attend to the places of each row's own path; see `ops.cuda.attention.attend`.

    Args:
        query: [T, num_heads, key_dim] contiguous.
        keys: [num_slots, num_kv_heads, key_dim] contiguous, of the query's dtype.
        values: [num_slots, num_kv_heads, value_dim] contiguous.
        output: [T, num_heads, value_dim] contiguous, written; padding rows are left as they are.
        rows: slots, positions, num_linear and path_slots are read.
        block_table: [S, B] int32, the blocks of each slot in order.
        block_size: places in a block of the cache.
        scale: factor on the scores.
        window: a row at position i sees positions above i - window; None means all positions.
        soft_cap: scores become soft_cap * tanh(scores / soft_cap); None leaves them.
        sinks: [num_heads] fp32, one extra logit per head in the softmax's denominator, or None.
        num_hidden: leading places that hold no entry.
    """
    num_chunks = chunk_of(block_table.shape[1] * block_size - 1, least=LEAST_CHUNK, first=FIRST_CHUNKS) + 1
    num_heads, key_dim = query.shape[1:]
    num_kv_heads, value_dim = values.shape[1:]
    group = num_heads // num_kv_heads
    tile_rows = max(1, TILE // triton.next_power_of_2(group))
    key_block, value_block = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    is_wide = tile_rows * triton.next_power_of_2(group) > TILE or max(key_block, value_block) > 128
    shape = {"NUM_HEADS": num_heads, "VALUE_DIM": value_dim, "VALUE_BLOCK": value_block}
    shape |= {"LEAST": LEAST_CHUNK, "FIRST": FIRST_CHUNKS}
    limits = (0 if window is None else window, num_hidden, num_chunks)
    most_rows = min(ROWS_PER_LAUNCH, len(query))
    part_max = torch.empty((most_rows, num_heads, num_chunks), dtype=torch.float32, device=query.device)
    part_sum = torch.empty_like(part_max)
    part_values = torch.empty((*part_max.shape, value_dim), dtype=torch.float32, device=query.device)
    for first in range(0, len(query), ROWS_PER_LAUNCH):
        launched = slice(first, min(first + ROWS_PER_LAUNCH, len(query)))
        num_rows = launched.stop - first
        parts = (part_values, part_max, part_sum)
        slots, positions = rows.slots[launched], rows.positions[launched]
        num_tiles = triton.cdiv(num_rows, tile_rows)
        num_programs = min(num_chunks, max(1, MOST_PROGRAMS // (num_tiles * num_kv_heads)))
        _attend_chunks[(num_tiles, num_kv_heads, num_programs)](
            *(query[launched], keys, values, *parts, slots, positions, rows.num_linear[launched]),
            *(rows.path_slots[launched], block_table, num_rows, rows.path_slots.shape[1]),
            *(block_table.shape[1], scale, *limits, num_programs),
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            TILE_ROWS=tile_rows,
            KEY_DIM=key_dim,
            KEY_BLOCK=key_block,
            BLOCK_SIZE=block_size,
            BLOCK_KEYS=BLOCK_KEYS,
            HAS_WINDOW=window is not None,
            SOFT_CAP=soft_cap or 0.0,
            num_warps=8 if is_wide and query.itemsize == 2 else 4,  # else it does not fit into the registers
            maxnreg=255,  # the most there are: left to choose, the assembler spills for the sake of another block
            **shape,
        )
        _join_chunks[(num_rows, num_heads)](
            *(*parts, output[launched], slots, positions, slots if sinks is None else sinks, *limits),
            HAS_WINDOW=window is not None,
            HAS_SINKS=sinks is not None,
            **shape,
        )
