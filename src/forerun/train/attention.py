"""Differentiable attention without a KV cache, which lets heads train on their own drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from forerun.kv.cache import LayerKV
from forerun.ops.attention.paged import attend_dense
from forerun.ops.native.library import Kernels
from forerun.ops.native.training import attention_gradients, can_compute_gradients

NO_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN, which makes a plan for each new shape of a batch, in tens of milliseconds."""


class CausalAttention:
    """An `Attend` of a target over B whole texts of equal length, padding included, without a cache: one call for all of them.

    Rows behind a text's end attend to it, and are attended to by none of its own.
    """

    def __init__(self, num_texts: int) -> None:
        self._num_texts = num_texts

    def __call__(
        self,
        layer: int,  # noqa: ARG002 - nothing is kept of it
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Attend`."""
        query, key, value = (rows.reshape(self._num_texts, -1, *rows.shape[1:]) for rows in (query, key, value))
        length = query.shape[1]
        if soft_cap is None and sinks is None and (window is None or window >= length):
            with sdpa_kernel(NO_PLANS):
                attended = F.scaled_dot_product_attention(
                    query.transpose(1, 2),
                    key.transpose(1, 2),
                    value.transpose(1, 2),
                    is_causal=True,
                    scale=scale,
                    enable_gqa=True,
                )
            return attended.transpose(1, 2).flatten(0, 1)
        mask = _visible(length, length, 0, window, device=query.device).expand(self._num_texts, -1, -1)
        return attend_dense(query, key, value, mask=mask, scale=scale, soft_cap=soft_cap, sinks=sinks).flatten(0, 1)


class UnrolledAttention:
    """An `Attend` over B texts of equal length and several consecutive passes of a head.

    The first pass is causal. Row r of a later pass continues row r of the pass before, as a draft does:
    it attends to the rows up to r of the first pass and row r of each later one, itself included (EAGLE-3's
    training-time test, arXiv 2503.01840). A later pass may leave out the last rows.
    """

    def __init__(self, num_texts: int) -> None:
        self._num_texts = num_texts
        self._first_queries: dict[int, Tensor] = {}  # by layer; [B, R, num_heads, key_dim]
        self._keys: dict[int, list[Tensor]] = {}  # by layer; of each pass [B, R, num_kv_heads, key_dim]
        self._values: dict[int, list[Tensor]] = {}

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Attend`."""
        assert sinks is None, "no head has sinks"
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(self._by_text(key))
        values.append(self._by_text(value))
        num_rows, num_kv_heads, key_dim = keys[-1].shape[1:]
        query = self._by_text(query)
        self._first_queries.setdefault(layer, query)
        # [B, R, num_kv_heads, query heads of each, key_dim]
        query = query.reshape(self._num_texts, num_rows, num_kv_heads, -1, key_dim)
        text = torch.einsum("brhgd,bchd->bhgrc", query, keys[0])
        own = [torch.einsum("brhgd,brhd->bhgr", query, later[:, :num_rows])[..., None] for later in keys[1:]]
        scores = torch.cat([text, *own], dim=-1).float() * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        visible = _visible(num_rows, text.shape[-1], len(own), window, device=scores.device)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1).to(value.dtype)
        attended = torch.einsum("bhgrc,bchd->brhgd", weights[..., : text.shape[-1]], values[0])
        for weight, later in zip(weights[..., text.shape[-1] :].unbind(-1), values[1:], strict=True):
            attended = attended + torch.einsum("bhgr,brhd->brhgd", weight, later[:, :num_rows])
        return attended.reshape(self._num_texts * num_rows, -1, value.shape[-1])

    def first_pass(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the queries and keys of a layer in the first pass, each [B, num_heads, R, dim]."""
        query, key = (rows.transpose(1, 2) for rows in (self._first_queries[layer], self._keys[layer][0]))
        return query, key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)

    def after_first_pass(self) -> UnrolledAttention:
        """As it was after the first pass, for later ones of another kind."""
        again = UnrolledAttention(self._num_texts)
        again._keys = {layer: keys[:1] for layer, keys in self._keys.items()}
        again._values = {layer: values[:1] for layer, values in self._values.items()}
        return again

    def _by_text(self, rows: Tensor) -> Tensor:
        """[B * R, heads, dim] -> [B, R, heads, dim]"""
        return rows.reshape(self._num_texts, -1, *rows.shape[1:])


class FlashUnrolledAttention:
    """`UnrolledAttention` without its matrices of scores, for texts in CPU memory; windows and caps are not covered.

    Gradients come from the kernels where there are any.
    """

    def __init__(self, num_texts: int, kernels: Kernels | None = None) -> None:
        self._num_texts, self._kernels = num_texts, kernels
        self._first_queries: dict[int, Tensor] = {}  # by layer; [B, num_heads, R, dim]
        self._keys: dict[int, list[Tensor]] = {}  # by layer; of each pass [B, num_heads, R, dim]
        self._values: dict[int, list[Tensor]] = {}

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Attend`."""
        assert (window, soft_cap, sinks) == (None, None, None), "heads that are begun here have none"
        num_heads = query.shape[1]
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(self._by_text(key, num_heads))
        values.append(self._by_text(value, num_heads))
        query = self._by_text(query, num_heads)
        self._first_queries.setdefault(layer, query)
        num_rows = query.shape[2]
        text = [part[0][:, :, :num_rows] for part in (keys, values)]
        own = [torch.stack([later[:, :, :num_rows] for later in part[1:]]) for part in (keys, values) if part[1:]]
        attended: Tensor = _MergedAttention.apply(  # type: ignore[no-untyped-call]
            query, *text, *(own or (None, None)), scale, self._kernels
        )
        return attended.transpose(1, 2).reshape(self._num_texts * num_rows, num_heads, -1)

    def first_pass(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the queries and keys of a layer in the first pass, each [B, num_heads, R, dim]."""
        return self._first_queries[layer], self._keys[layer][0]

    def after_first_pass(self) -> FlashUnrolledAttention:
        """As it was after the first pass, for later ones of another kind."""
        again = FlashUnrolledAttention(self._num_texts, self._kernels)
        again._keys = {layer: keys[:1] for layer, keys in self._keys.items()}
        again._values = {layer: values[:1] for layer, values in self._values.items()}
        return again

    def _by_text(self, rows: Tensor, num_heads: int) -> Tensor:
        """[B * R, heads, dim] -> [B, num_heads, R, dim]"""
        by_text = rows.reshape(self._num_texts, -1, *rows.shape[1:]).transpose(1, 2)
        return by_text.repeat_interleave(num_heads // rows.shape[1], dim=1)


class _MergedAttention(torch.autograd.Function):
    """Causal attention to a text, merged with attention of each row to its own later keys [n, B, heads, R, dim].

    Softmax over both is that over the text alone, weighted by the sums of exponentials. In the backward pass the text's
    share follows from the merged output and sum alone (FlashAttention, arXiv 2205.14135).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own_key: Tensor | None,
        own_value: Tensor | None,
        scale: float,
        kernels: Kernels | None,
    ) -> Tensor:
        merged, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, True, scale=scale
        )
        if own_key is not None and own_value is not None:
            scores = (query * own_key).sum(-1, dtype=torch.float32) * scale  # [n, B, heads, R]
            text_sum = log_sum.view(scores.shape[1:])
            total = torch.logaddexp(text_sum, scores.logsumexp(0))
            wide = merged.float() * (text_sum - total).exp()[..., None]
            merged = (wide + ((scores - total).exp()[..., None] * own_value).sum(0)).to(query.dtype)
            log_sum = total.view_as(log_sum)
        ctx.save_for_backward(query, key, value, own_key, own_value, merged, log_sum)
        ctx.scale, ctx.kernels = scale, kernels
        result: Tensor = merged
        return result

    @staticmethod
    def backward(ctx: Any, of_merged: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, own_key, own_value, merged, log_sum = ctx.saved_tensors
        scale, kernels = ctx.scale, ctx.kernels
        if kernels is not None and can_compute_gradients(query):
            of_query, of_key, of_value = attention_gradients(
                kernels, of_merged, query, key, value, merged, log_sum, scale=scale
            )
        else:
            of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                of_merged.contiguous(), query, key, value, merged, log_sum, 0.0, True, scale=scale
            )
        if own_key is None:
            return of_query, of_key, of_value, None, None, None, None
        weights = ((query * own_key).sum(-1, dtype=torch.float32) * scale - log_sum.view(query.shape[:-1])).exp()
        mean = (of_merged * merged).sum(-1, dtype=torch.float32)
        of_scores = weights * ((of_merged * own_value).sum(-1, dtype=torch.float32) - mean) * scale
        of_scores = of_scores[..., None].to(query.dtype)
        of_query = of_query + (of_scores * own_key).sum(0)
        of_own_value = weights[..., None].to(query.dtype) * of_merged
        return of_query, of_key, of_value, of_scores * query, of_own_value, None, None


class BlockAttention:
    """An `Attend` over B texts with A blocks of R rows each, of which block a begins at position a + 1.

    A row attends to the context's positions before its block and to all rows of its own block. The context's
    keys and values [B, S, num_kv_heads, dim] are given for each layer.
    """

    def __init__(self, context: Sequence[LayerKV], *, num_blocks: int) -> None:
        self._context = context
        self._num_blocks = num_blocks

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Attend`."""
        assert (window, soft_cap, sinks) == (None, None, None), "heads that are begun here have none"
        keys, values = self._context[layer].key, self._context[layer].value
        num_texts, num_places, num_kv_heads, key_dim = keys.shape
        blocks = (num_texts, self._num_blocks, -1, num_kv_heads)
        # [B, A, R, num_kv_heads, query heads of each, key_dim]
        query = query.reshape(num_texts, self._num_blocks, -1, num_kv_heads, query.shape[1] // num_kv_heads, key_dim)
        key, value = key.reshape(*blocks, key_dim), value.reshape(*blocks, value.shape[-1])
        text = torch.einsum("barhgd,bchd->bahgrc", query, keys)
        own = torch.einsum("barhgd,bachd->bahgrc", query, key)
        before = torch.arange(num_places) <= torch.arange(self._num_blocks)[:, None]  # [A, S]
        text = text.masked_fill(~before.to(text.device)[:, None, None, None], float("-inf"))
        weights = (torch.cat([text, own], dim=-1).float() * scale).softmax(dim=-1).to(value.dtype)
        attended = torch.einsum("bahgrc,bchd->barhgd", weights[..., :num_places], values)
        attended = attended + torch.einsum("bahgrc,bachd->barhgd", weights[..., num_places:], value)
        return attended.flatten(3, 4).flatten(0, 2)


def unrolled_attention(
    num_texts: int, device: torch.device, kernels: Kernels | None = None
) -> UnrolledAttention | FlashUnrolledAttention:
    """Return the attention of a head in training whose layers have no windows and caps: the fused one is of CPUs alone."""
    return FlashUnrolledAttention(num_texts, kernels) if device.type == "cpu" else UnrolledAttention(num_texts)


def _visible(num_rows: int, num_keys: int, num_later: int, window: int | None, *, device: torch.device) -> Tensor:
    """Make the attention mask of pass `num_later`, [num_rows, num_keys + num_later]; row r of pass n has position r + n."""
    rows, keys = torch.arange(num_rows, device=device)[:, None], torch.arange(num_keys, device=device)[None]
    text, own = keys <= rows, torch.ones(num_rows, num_later, dtype=torch.bool, device=device)
    if window is not None:
        text = text & (keys > rows + num_later - window)
        own &= torch.arange(1, num_later + 1, device=device) > num_later - window
    return torch.cat([text, own], dim=1)
