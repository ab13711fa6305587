"""The tensors that hold keys, values and kept features, addressed by slot (block_id * block_size + offset)."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.core.batch import LayerKVSpec

# Shared memory, which is mmap's default, is given huge pages on few systems.
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys [num_slots, num_kv_heads, key_dim] and values [num_slots, num_kv_heads, value_dim]."""

    key: Tensor
    value: Tensor


class KVCache:
    """Keys and values of every layer; all layers share block ids and slots.

    `features` ([num_slots, width] each) are the target's hidden states that a drafter asked for. They lie
    beside the KV of their token, so that whoever finds its block in the prefix cache finds them too.
    """

    def __init__(
        self,
        specs: Sequence[LayerKVSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        feature_widths: Mapping[str, int] | None = None,
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
        self.features = {
            name: _zeros((num_slots, width), dtype, device) for name, width in (feature_widths or {}).items()
        }

    @property
    def num_bytes(self) -> int:
        """Memory of all layers and features; on a CPU it is taken as blocks are first used."""
        tensors = (*(kv for layer in self.layers for kv in (layer.key, layer.value)), *self.features.values())
        return sum(tensor.nbytes for tensor in tensors)

    def keep(self, slots: Tensor, features: Mapping[str, Tensor]) -> None:
        """Store a pass's features, name -> [T, width], at the slots [T] of its rows."""
        for name, rows in features.items():
            self.features[name].index_copy_(0, slots, rows.to(self.features[name].dtype))

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy what lies at slots `sources` to slots `destinations` ([n] int64), in every layer and feature.

        All sources are read before any destination is written, so the two may overlap.
        """
        for entries in (*(kv for layer in self.layers for kv in (layer.key, layer.value)), *self.features.values()):
            entries.index_copy_(0, destinations, entries.index_select(0, sources))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the system gives the memory page by page as blocks are first used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Mapped here, because torch.zeros writes to all of it at once and NumPy's zeros write to memory that its allocator reuses.
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = map_memory(max(num_bytes, 1))
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes].view(dtype).view(shape)


def map_memory(num_bytes: int) -> mmap.mmap:
    """Memory of this process alone, all zeros; the system provides each page when it is first written to."""
    return mmap.mmap(-1, num_bytes, **PRIVATE)


def bytes_per_block(
    specs: Sequence[LayerKVSpec],
    *,
    block_size: int,
    dtype: torch.dtype,
    feature_widths: Mapping[str, int] | None = None,
) -> int:
    """Bytes that one block takes over all layers and features."""
    per_token = sum(spec.num_kv_heads * (spec.key_dim + spec.value_dim) for spec in specs)
    per_token += sum((feature_widths or {}).values())
    return per_token * block_size * dtype.itemsize
