"""The tensors that hold keys, values and kept features, addressed by slot (block_id * block_size + offset)."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.core.batch import LayerKVSpec
from forerun.errors import ConfigError, MemoryBudgetError, one_line

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
        self.block_size, self.num_blocks = block_size, num_blocks
        num_slots = num_blocks * block_size
        widths = feature_widths or {}
        shapes: list[tuple[int, ...]] = [
            (spec.num_kv_heads, dim) for spec in specs for dim in (spec.key_dim, spec.value_dim)
        ]
        shapes += [(width,) for width in widths.values()]
        # Those of one shape lie in one tensor, so that all layers of most models are moved at once.
        self._stacks = {
            shape: _zeros((count, num_slots, *shape), dtype, device) for shape, count in Counter(shapes).items()
        }
        rest = {shape: iter(stack) for shape, stack in self._stacks.items()}
        entries = [next(rest[shape]) for shape in shapes]
        self.layers = [LayerKV(*entries[2 * layer : 2 * layer + 2]) for layer in range(len(specs))]
        self.features = dict(zip(widths, entries[2 * len(specs) :], strict=True))

    @property
    def num_bytes(self) -> int:
        """Memory of all layers and features; on a CPU it is taken as blocks are first used."""
        return sum(stack.nbytes for stack in self._stacks.values())

    @property
    def stacks(self) -> Sequence[Tensor]:
        """All keys, values and features, [entries, num_slots, ...] for each of their shapes, contiguous."""
        return list(self._stacks.values())

    def check_health(self) -> None:
        """Look whether all processes that hold a part of the cache are there; this one holds all of it."""

    def slots_of(self, blocks: Sequence[int] | npt.NDArray[np.int32]) -> Tensor:
        """The slots of blocks, one block after the other: [n * block_size] int64, on the host."""
        first = np.asarray(blocks, dtype=np.int64) * self.block_size
        return torch.from_numpy((first[:, None] + np.arange(self.block_size)).reshape(-1))

    def keep(self, slots: Tensor, features: Mapping[str, Tensor]) -> None:
        """Store a pass's features, name -> [T, width], at the slots [T] of its rows."""
        for name, rows in features.items():
            self.features[name].index_copy_(0, slots, rows.to(self.features[name].dtype))

    def read(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Copies of what lies at slots [n] int64: [entries, n, ...] for each shape of keys, values and features."""
        return tuple(stack.index_select(1, slots) for stack in self._stacks.values())

    def write(self, slots: Tensor, contents: Sequence[Tensor]) -> None:
        """Put what `read` of a cache of the same layers and features gave to slots [n] int64.

        Raises:
            ConfigError: the other cache has other layers, features or another dtype.
        """
        stacks = self.stacks
        expected = [((len(stack), len(slots), *stack.shape[2:]), stack.dtype) for stack in stacks]
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in contents]
        if found != expected:
            raise ConfigError(
                f"KV transfer: got KV of the shapes {found}, this engine has {expected}; give both engines the same model, "
                "dtype, block_size and speculative_config"
            )
        for stack, tensor in zip(stacks, contents, strict=True):
            stack.index_copy_(1, slots, tensor)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy what lies at slots `sources` to slots `destinations` ([n] int64), in every layer and feature.

        All sources are read before any destination is written, so the two may overlap.
        """
        for stack in self._stacks.values():
            stack.index_copy_(1, destinations, stack.index_select(1, sources))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the system gives the memory page by page as blocks are first used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Mapped here, because torch.zeros writes to all of it at once and NumPy's zeros write to memory that its allocator reuses.
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = map_memory(max(num_bytes, 1))
    except OSError as error:
        raise MemoryBudgetError(
            f"KV memory: the system gives no {num_bytes / 2**30:.1f} GiB ({one_line(error)}); lower kv_cache_memory_bytes or "
            "num_gpu_blocks_override"
        ) from error
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
