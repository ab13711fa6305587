"""Lets transformers' modelling code call forerun's attention, once a probe and a comparison of logits show that it can.

In transformers a model's attention can be replaced by a registered function, which gets queries, keys and
values after rotary embedding, and the keyword arguments of the model's own call: an `AttentionHandler`
is one of these arguments. Masks are not built, as forerun's attention knows which row sees which; for
the probe a function that stands in for the mask finds out what it would have been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from forerun.core.batch import ForwardBatch, LayerKVSpec, SequenceRows
from forerun.errors import one_line
from forerun.kv.cache import KVCache
from forerun.models.base import CausalModel
from forerun.models.transformers_logging import quiet_transformers
from forerun.ops.attention import Attend
from forerun.ops.attention.paged import PagedAttention

EAGER = "eager"  # transformers' reference attention
PAGED = "forerun"  # names of forerun's attention in transformers' registry
PROBE = "forerun_probe"
FAR = 1 << 20  # tokens; farther than any window
CHECKED_TOKENS = 8
CHECKED_BLOCK_SIZE = 4
TOLERANCE = 1e-3  # of a row's norm
HALF_TOLERANCE = 0.1  # of the median row's: in 16 bits a router's near tie may fall the other way in some
SELECTIONS = ("indices", "block_indices")  # arguments by which a layer names the tokens that it attends to


class UnsupportedAttentionError(Exception):
    """A model's attention does something that forerun's cannot do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The arguments of one attention call, packed as in forerun: [T, heads, dim]."""

    layer_idx: int  # transformers' number of the layer
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None


class AttentionHandler(Protocol):
    """Computes the attention calls of one forward pass."""

    def __call__(self, call: AttentionCall) -> Tensor:
        """Attend -> [T, num_heads, value_dim]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedLayer:
    """One attention layer as the probe found it; `index` is its layer in the KV cache."""

    index: int
    spec: LayerKVSpec
    window: int | None


@dataclass(frozen=True, slots=True)
class PagedHandler:
    """Attends over forerun's paged KV cache."""

    attend: Attend
    layers: Mapping[int, ProbedLayer]

    def __call__(self, call: AttentionCall) -> Tensor:
        """Attend over the paged cache."""
        layer = self.layers[call.layer_idx]
        return self.attend(
            layer.index,
            call.query,
            call.key,
            call.value,
            scale=call.scale,
            window=layer.window,
            soft_cap=call.soft_cap,
            sinks=call.sinks,
        )


@dataclass(slots=True)
class ProbeHandler:
    """Records the layers of a pass over one token, which attends to itself alone."""

    layers: dict[int, ProbedLayer] = field(default_factory=dict)
    num_calls: int = 0

    def __call__(self, call: AttentionCall) -> Tensor:
        """Record the layer, and return the token's own values, which are all that it attends to."""
        self.num_calls += 1
        _, num_kv_heads, key_dim = call.key.shape
        self.layers[call.layer_idx] = ProbedLayer(
            index=len(self.layers),
            spec=LayerKVSpec(num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=call.value.shape[2]),
            window=_window(call),
        )
        return call.value.repeat_interleave(call.query.shape[1] // num_kv_heads, dim=1)


def register() -> None:
    """Register forerun's attention in transformers; doing it again changes nothing."""
    AttentionInterface.register(PAGED, _attention_forward)
    AttentionInterface.register(PROBE, _attention_forward)
    AttentionMaskInterface.register(PROBE, _probe_mask)


def with_attention(model: Any, implementation: str, compute: Callable[[], Any]) -> Any:
    """Set one of transformers' registered attentions, then compute.

    Raises:
        UnsupportedAttentionError: the model's code raised anything, as it may where it does not expect forerun's attention.
    """
    try:
        with quiet_transformers():
            model.set_attn_implementation(implementation)
            return compute()
    except UnsupportedAttentionError:
        raise
    except Exception as error:
        raise UnsupportedAttentionError(one_line(error)) from error


def check_logits(model: CausalModel, tokens: Tensor, reference: Tensor) -> None:
    """Compare a model's logits over a paged cache with `reference`, for a chunked and a whole prompt packed together.

    Args:
        model: the model, which calls forerun's attention.
        tokens: the prompt, [CHECKED_TOKENS] int64.
        reference: the logits that eager attention gives, [CHECKED_TOKENS, vocab_size] fp32.

    Raises:
        UnsupportedAttentionError: they differ by more than rounding.
    """
    block_size, split = CHECKED_BLOCK_SIZE, CHECKED_TOKENS - 3
    cache = KVCache(model.kv_specs, num_blocks=4, block_size=block_size, dtype=model.dtype, device=model.device)
    chunked, whole = np.array([[0, 2], [3, 1]], dtype=np.int32)
    first = _run(model, cache, tokens, [SequenceRows(num_context=0, num_rows=split, block_ids=chunked)])
    second = _run(
        model,
        cache,
        tokens,
        [
            SequenceRows(num_context=split, num_rows=CHECKED_TOKENS - split, block_ids=chunked),
            SequenceRows(num_context=0, num_rows=CHECKED_TOKENS, block_ids=whole),
        ],
    )
    found = torch.cat([first, second])
    expected = torch.cat([reference, reference])
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    is_half = model.dtype.itemsize < torch.float32.itemsize
    error = (errors.median() if is_half else errors.max()).item()
    if not error <= (HALF_TOLERANCE if is_half else TOLERANCE):
        raise UnsupportedAttentionError(f"logits differ from eager attention's by {error:.1%}")


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it: [1, heads, T, dim] in, [1, T, heads, dim] out.

    Its other arguments (dropout, and those of other implementations) are not used. A selection of tokens is refused, as it
    matters only in texts that are longer than the one that is compared.
    """
    if "handler" not in kwargs:
        raise UnsupportedAttentionError("it does not pass keyword arguments of the model's call on to attention")
    if any(kwargs.get(name) is not None for name in SELECTIONS):
        raise UnsupportedAttentionError("it attends to some of the past tokens only, which it selects")
    handler: AttentionHandler = kwargs["handler"]
    layer_idx: Any = module.layer_idx
    call = AttentionCall(
        layer_idx=layer_idx,
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        mask=attention_mask,
        scale=scaling,
        window=kwargs.get("sliding_window"),
        soft_cap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    return handler(call)[None], None


def _probe_mask(
    *, mask_function: Callable[..., Any], local_size: int | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    """Return one number in place of a mask: the window of a sliding mask, or 0 for a causal one.

    The mask's rule is evaluated for single rows and columns, so that a window is found even where the
    model's code passes it to attention by the mask alone.
    """

    def sees(row: int, column: int) -> bool:
        return bool(mask_function(0, 0, torch.tensor(row, device=device), torch.tensor(column, device=device)))

    if sees(0, 1):
        raise UnsupportedAttentionError("its tokens see later ones")
    if local_size is None:
        if not sees(FAR, 0):
            raise UnsupportedAttentionError("its mask is neither causal nor a sliding window")
        return torch.zeros(1, 1, 1, 1, device=device)
    if sees(local_size, 0) or not sees(local_size, 1):
        raise UnsupportedAttentionError("its mask is neither causal nor a sliding window")
    return torch.full((1, 1, 1, 1), float(local_size), device=device)


def _window(call: AttentionCall) -> int | None:
    """Return the layer's window: the mask's, as in eager attention, or without a mask the argument's."""
    if call.mask is None:
        return call.window
    window = call.mask.item() if call.mask.numel() == 1 else -1.0
    if window < 0 or window != int(window):
        raise UnsupportedAttentionError("it computes a mask of its own")
    return int(window) or None


def _run(model: CausalModel, cache: KVCache, tokens: Tensor, sequences: list[SequenceRows]) -> Tensor:
    """Run one pass over rows of sequences that all hold `tokens`, and return the logits of every row."""
    positions = [at for rows in sequences for at in range(rows.num_context, rows.num_context + rows.num_rows)]
    slots = [
        rows.block_ids[at // cache.block_size] * cache.block_size + at % cache.block_size
        for rows in sequences
        for at in range(rows.num_context, rows.num_context + rows.num_rows)
    ]
    at = tokens.new_tensor(positions)
    batch = ForwardBatch(
        token_ids=tokens[at],
        positions=at,
        slot_mapping=tokens.new_tensor(slots),
        sequences=sequences,
        block_size=cache.block_size,
        logits_rows=torch.arange(len(positions), device=tokens.device),
    )
    return model.forward(batch, PagedAttention().begin(batch, cache)).logits
