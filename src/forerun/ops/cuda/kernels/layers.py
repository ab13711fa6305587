"""Norms, rotary embedding, KV writes, embeddings; `ops.cuda.layers` is the twin and says what is computed.

A program computes one row, or one head of a row, whole: the order of its sums is that of its width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from forerun.ops.rotary import Rotation

WIDTH_PER_PROGRAM = 1024


@triton.jit
def _embed(token_ids, table, residual, scale, W, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + row).to(tl.int64)
    entry = tl.load(table + token * W + at, at < W, 0.0).to(tl.float32)
    tl.store(residual + row * W + at, entry * scale, at < W)


def embed(token_ids: Tensor, table: Tensor, residual: Tensor, *, scale: float = 1.0) -> None:
    """Write the embedding of each token: [T] integers, table [V, W] -> residual [T, W] fp32; see `ops.cuda.layers.embed`."""
    num_rows, width = residual.shape
    grid = (num_rows, triton.cdiv(width, WIDTH_PER_PROGRAM))
    _embed[grid](token_ids, table, residual, scale, width, BLOCK=WIDTH_PER_PROGRAM)


@triton.jit
def _norm(
    x, weight, output, eps, scale, W, X_STRIDE, OUTPUT_STRIDE,
    HAS_WEIGHT: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    result = tl.load(x + row * X_STRIDE + at, at < W, 0.0).to(tl.float32)
    if HAS_WEIGHT:
        result = result * tl.rsqrt(tl.sum(result * result, 0) / W + eps)
        result = result * tl.load(weight + at, at < W, 0.0).to(tl.float32)
    place = output + row * OUTPUT_STRIDE + at
    if ADDS:
        result = tl.load(place, at < W, 0.0) + result * scale
    tl.store(place, result.to(output.dtype.element_ty), at < W)


def _norm_rows(x: Tensor, weight: Tensor | None, output: Tensor, *, eps: float, scale: float, adds: bool) -> None:
    num_rows, width = x.shape
    _norm[(num_rows,)](
        *(x, x if weight is None else weight, output, eps, scale, width, x.stride(0), output.stride(0)),
        HAS_WEIGHT=weight is not None,
        ADDS=adds,
        BLOCK=triton.next_power_of_2(width),
    )


def rms_norm(x: Tensor, weight: Tensor | None, output: Tensor, *, eps: float) -> None:
    """Write x / rms(x) * weight: x [T, W], weight [W] -> output [T, W], which may be x; see `ops.cuda.layers.rms_norm`.

    Rows may lie apart in wider ones.
    """
    _norm_rows(x, weight, output, eps=eps, scale=1.0, adds=False)


def add_normed(update: Tensor, weight: Tensor, residual: Tensor, *, eps: float, scale: float = 1.0) -> None:
    """Add update / rms(update) * weight, times `scale`, to `residual` in place: [T, W], [W], [T, W] fp32."""
    _norm_rows(update, weight, residual, eps=eps, scale=scale, adds=True)


@triton.jit
def _keep(source, kv_slots, destination, W, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(kv_slots + row)
    entry = tl.load(source + row * W + at, at < W, 0.0)
    tl.store(destination + slot * W + at, entry.to(destination.dtype.element_ty), (at < W) & (slot >= 0))


def keep(source: Tensor, kv_slots: Tensor, destination: Tensor) -> None:
    """Write each row to its slot of the cache: [T, W], [T] int64, -1: nowhere -> [num_slots, W]; see `ops.cuda.layers.keep`."""
    num_rows, width = source.shape
    grid = (num_rows, triton.cdiv(width, WIDTH_PER_PROGRAM))
    _keep[grid](source, kv_slots, destination, width, BLOCK=WIDTH_PER_PROGRAM)


@triton.jit
def _rotate_and_write(
    qkv, query, keys, values, kv_slots, cos, sin, query_norm, key_norm, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, DIM_BLOCK: tl.constexpr,
    HAS_QUERY_NORM: tl.constexpr, HAS_KEY_NORM: tl.constexpr, QUERY_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr,
):  # fmt: skip
    row, head, dims = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DIM_BLOCK)
    # Dimension i pairs with i + HALF; those from 2 * HALF on stay.
    pair = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    source = qkv + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * DIM
    x = tl.load(source + dims, dims < DIM, 0.0).to(tl.float32)
    paired = tl.load(source + pair, dims < DIM, 0.0).to(tl.float32)
    slot = tl.load(kv_slots + row)
    if head >= NUM_HEADS + NUM_KV_HEADS:
        at = (slot * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * DIM
        tl.store(values + at + dims, x.to(values.dtype.element_ty), (dims < DIM) & (slot >= 0))
    else:
        is_query = head < NUM_HEADS
        if HAS_QUERY_NORM:
            if is_query:
                weight = query_norm + head * QUERY_STRIDE
                scale = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
                x = x * scale * tl.load(weight + dims, dims < DIM, 0.0).to(tl.float32)
                paired = paired * scale * tl.load(weight + pair, dims < DIM, 0.0).to(tl.float32)
        if HAS_KEY_NORM:
            if head >= NUM_HEADS:
                weight = key_norm + (head - NUM_HEADS) * KEY_STRIDE
                scale = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
                x = x * scale * tl.load(weight + dims, dims < DIM, 0.0).to(tl.float32)
                paired = paired * scale * tl.load(weight + pair, dims < DIM, 0.0).to(tl.float32)
        angle = row * HALF + tl.where(dims < HALF, dims, dims - HALF)
        is_rotated = dims < 2 * HALF
        c = tl.load(cos + angle, is_rotated, 1.0).to(tl.float32)
        s = tl.load(sin + angle, is_rotated, 0.0).to(tl.float32)
        rotated = x * c + paired * tl.where(dims < HALF, -s, s)
        rotated = tl.where(is_rotated, rotated, x)
        if is_query:
            at = (row * NUM_HEADS + head) * DIM
            tl.store(query + at + dims, rotated.to(query.dtype.element_ty), dims < DIM)
        else:
            at = (slot * NUM_KV_HEADS + head - NUM_HEADS) * DIM
            tl.store(keys + at + dims, rotated.to(keys.dtype.element_ty), (dims < DIM) & (slot >= 0))


def rotate_and_write(
    qkv: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    kv_slots: Tensor,
    rotation: Rotation | None,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm and rotate each row's queries and keys, and write its keys and values to the cache.

    Args:
        qkv: [T, num_heads + 2 * num_kv_heads, head_dim] contiguous: queries, keys, values.
        query: [T, num_heads, head_dim] contiguous, written.
        keys: [num_slots, num_kv_heads, head_dim] contiguous, written at the rows' slots.
        values: [num_slots, num_kv_heads, head_dim] contiguous, likewise.
        kv_slots: [T] int64; -1: nothing of this row is written to the cache.
        rotation: cosine and sine of each row, [T, 1, half] each, fp32, contiguous; None: nothing is rotated.
        query_norm: [head_dim], or [num_heads, head_dim], weight of an RMSNorm over each query head; None: no norm.
        key_norm: the same for key heads.
        eps: of the norms.
    """
    num_heads, dim = query.shape[1:]
    num_kv_heads = keys.shape[1]
    cos, sin = (qkv, qkv) if rotation is None else rotation
    _rotate_and_write[(len(query), num_heads + 2 * num_kv_heads)](
        *(qkv, query, keys, values, kv_slots, cos, sin),
        *(qkv if query_norm is None else query_norm, qkv if key_norm is None else key_norm, eps),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        DIM=dim,
        HALF=0 if rotation is None else cos.shape[-1],
        DIM_BLOCK=triton.next_power_of_2(dim),
        HAS_QUERY_NORM=query_norm is not None,
        HAS_KEY_NORM=key_norm is not None,
        QUERY_STRIDE=_stride(query_norm),
        KEY_STRIDE=_stride(key_norm),
    )


def _stride(weight: Tensor | None) -> int:
    """From one head's weight to the next's: 0 where all share one."""
    return weight.shape[1] if weight is not None and weight.ndim == 2 else 0
