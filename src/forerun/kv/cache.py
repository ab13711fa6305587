"""The tensors that hold keys and values, addressed by slot (block_id * block_size + offset)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.core.batch import LayerKVSpec


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys [num_slots, num_kv_heads, key_dim] and values [num_slots, num_kv_heads, value_dim]."""

    key: Tensor
    value: Tensor


class KVCache:
    """Keys and values of every layer; all layers share block ids and slots."""

    def __init__(
        self,
        specs: Sequence[LayerKVSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        num_slots = num_blocks * block_size
        self.layers = [
            LayerKV(
                _zeros((num_slots, spec.num_kv_heads, spec.key_dim), dtype, device),
                _zeros((num_slots, spec.num_kv_heads, spec.value_dim), dtype, device),
            )
            for spec in specs
        ]

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy the entries at slots `sources` to slots `destinations` ([n] int64), in every layer.

        All sources are read before any destination is written, so the two may overlap.
        """
        for layer in self.layers:
            layer.key.index_copy_(0, destinations, layer.key.index_select(0, sources))
            layer.value.index_copy_(0, destinations, layer.value.index_select(0, sources))


def _zeros(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the system gives the memory page by page as blocks are first used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy leaves zeroing to the system, where torch.zeros would write to all of it now.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)


def bytes_per_block(specs: Sequence[LayerKVSpec], *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers."""
    per_token = sum(spec.num_kv_heads * (spec.key_dim + spec.value_dim) for spec in specs)
    return per_token * block_size * dtype.itemsize
