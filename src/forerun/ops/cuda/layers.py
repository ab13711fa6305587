"""Norms, rotary embedding, KV writes, embeddings: what lies between a layer's matrix products. The twin of `kernels.layers`.

Everything is computed in fp32 and rounded once, to the dtype of what is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.ops.cuda.table import StepRows
from forerun.ops.rotary import Rotation, rotate


def embed(rows: StepRows, table: Tensor, residual: Tensor, *, scale: float = 1.0) -> None:
    """Write the embedding of each row's token: table [V, W] -> residual [T, W] fp32; padding rows have token 0."""
    residual.copy_(table[rows.tokens.long()].float() * scale)


def rms_norm(x: Tensor, weight: Tensor, output: Tensor, *, eps: float) -> None:
    """Write x / rms(x) * weight: x [T, W], weight [W] -> output [T, W] (RMSNorm, arXiv 1910.07467)."""
    output.copy_(_normed(x.float(), weight, eps).to(output.dtype))


def add_rms_norm(
    residual: Tensor, update: Tensor, weight: Tensor, output: Tensor, *, eps: float, scale: float = 1.0
) -> None:
    """Add `update` [T, W] times `scale` to `residual` [T, W] fp32 in place, and write the norm of the sum to `output`."""
    residual += update.float() * scale
    rms_norm(residual, weight, output, eps=eps)


def rotate_and_write(
    qkv: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: StepRows,
    rotation: Rotation,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm and rotate each row's queries and keys, and write its keys and values to the cache.

    Args:
        qkv: [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
        query: [T, num_heads, head_dim], written.
        keys: [num_slots, num_kv_heads, head_dim], written at the rows' `kv_slots`.
        values: [num_slots, num_kv_heads, head_dim], likewise.
        rows: positions and kv_slots are read; nothing of a padding row is written to the cache.
        rotation: cosine and sine of every position, [L, 1, half] each, fp32.
        query_norm: [head_dim], or [num_heads, head_dim], weight of an RMSNorm over each query head; None: no norm.
        key_norm: the same for key heads.
        eps: of the norms.
    """
    num_heads, num_kv_heads = query.shape[1], keys.shape[1]
    wide, at = qkv.float(), rows.positions.long()
    cos, sin = rotation.cos[at].float(), rotation.sin[at].float()
    heads, key, value = wide[:, :num_heads], wide[:, num_heads:-num_kv_heads], wide[:, -num_kv_heads:]
    heads = heads if query_norm is None else _normed(heads, query_norm, eps)
    key = key if key_norm is None else _normed(key, key_norm, eps)
    query.copy_(rotate(heads, Rotation(cos, sin)).to(query.dtype))
    real = rows.kv_slots >= 0
    keys[rows.kv_slots[real]] = rotate(key, Rotation(cos, sin)).to(keys.dtype)[real]
    values[rows.kv_slots[real]] = value.to(values.dtype)[real]


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
