"""Norms, rotary embedding, KV writes, embeddings: what lies between a layer's matrix products. The twin of `kernels.layers`.

Everything is computed in fp32 and rounded once, to the dtype of what is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.ops.rotary import Rotation, rotate


def embed(token_ids: Tensor, table: Tensor, residual: Tensor, *, scale: float = 1.0) -> None:
    """Write the embedding of each token: [T] integers, table [V, W] -> residual [T, W] fp32; padding rows have token 0."""
    residual.copy_(table[token_ids.long()].float() * scale)


def rms_norm(x: Tensor, weight: Tensor | None, output: Tensor, *, eps: float) -> None:
    """Write x / rms(x) * weight: x [T, W], weight [W] -> output [T, W], which may be x (RMSNorm, arXiv 1910.07467).

    Without a weight there is no norm: x is written as it is.
    """
    output.copy_(x if weight is None else _normed(x.float(), weight, eps))


def add_normed(update: Tensor, weight: Tensor, residual: Tensor, *, eps: float, scale: float = 1.0) -> None:
    """Add update / rms(update) * weight, times `scale`, to `residual` in place: [T, W], [W], [T, W] fp32."""
    residual += _normed(update.float(), weight, eps) * scale


def keep(source: Tensor, kv_slots: Tensor, destination: Tensor) -> None:
    """Write each row to its slot of the cache: [T, W], [T] int64, -1: nowhere -> [num_slots, W]."""
    real = kv_slots >= 0
    destination[kv_slots[real]] = source[real].to(destination.dtype)


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
        qkv: [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
        query: [T, num_heads, head_dim], written.
        keys: [num_slots, num_kv_heads, head_dim], written at the rows' slots.
        values: [num_slots, num_kv_heads, head_dim], likewise.
        kv_slots: [T] int64; -1: nothing of this row is written to the cache.
        rotation: cosine and sine of each row, [T, 1, half] each, fp32; None: nothing is rotated.
        query_norm: [head_dim], or [num_heads, head_dim], weight of an RMSNorm over each query head; None: no norm.
        key_norm: the same for key heads.
        eps: of the norms.
    """
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    wide = qkv.float()
    heads, key, value = wide[:, :num_heads], wide[:, num_heads:-num_kv_heads], wide[:, -num_kv_heads:]
    heads = heads if query_norm is None else _normed(heads, query_norm, eps)
    key = key if key_norm is None else _normed(key, key_norm, eps)
    if rotation is not None:
        heads, key = rotate(heads, rotation), rotate(key, rotation)
    query.copy_(heads)
    real = kv_slots >= 0
    keys[kv_slots[real]] = key.to(keys.dtype)[real]
    values[kv_slots[real]] = value.to(values.dtype)[real]


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
