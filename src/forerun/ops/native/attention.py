"""Attention over the paged cache by the kernels: the twin of `ops.attention.naive` whose bits depend on the text alone."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from ctypes import Array
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, LayerKVSpec
from forerun.core.host_arrays import address_of
from forerun.kv.cache import KVCache
from forerun.ops.native.library import Kernels
from forerun.ops.native.structs import STACK_WORDS, STORAGE, AttentionStruct, PassStruct, RotationStruct
from forerun.ops.rotary import Rotation

MOST_KEY_DIM = 1024
"""`kMaxKeyDim` of csrc/attention.h."""


def can_attend(specs: Iterable[LayerKVSpec]) -> bool:
    """Whether the kernels take keys of these sizes."""
    return all(spec.key_dim % 2 == 0 and spec.key_dim <= MOST_KEY_DIM for spec in specs)


class CacheAddresses:
    """Where each layer's keys and values are, as arrays of addresses that the kernels read."""

    def __init__(self, cache: KVCache) -> None:
        self.storage = STORAGE[cache.layers[0].key.dtype]
        self._keys = np.array([kv.key.data_ptr() for kv in cache.layers], dtype=np.int64)
        self._values = np.array([kv.value.data_ptr() for kv in cache.layers], dtype=np.int64)
        self._places = (self._keys.ctypes.data, self._values.ctypes.data)
        self._features = {name: rows.data_ptr() for name, rows in cache.features.items()}
        self._stacks = array("Q")  # `CacheStack` of csrc/decoder.h
        for stack in cache.stacks:
            self._stacks.extend((stack.data_ptr(), len(stack), stack.shape[1], stack[0, 0].nbytes))
        self._kept: dict[frozenset[int], array[int]] = {}  # see `kept`

    def has_room_for(self, layers: frozenset[int]) -> bool:
        """Whether the cache keeps the residual streams before all of these layers."""
        return layers in self._kept or all(f"hidden.{layer}" in self._features for layer in layers)

    def kept(self, layers: frozenset[int]) -> int:
        """The address of an array that says where the residual stream before each layer is kept, 0 where it is not."""
        found = self._kept.get(layers)
        if found is None:
            places = [self._features[f"hidden.{i}"] if i in layers else 0 for i in range(len(self._keys) + 1)]
            found = self._kept[layers] = array("q", places)
        return address_of(found)

    @property
    def stacks(self) -> tuple[int, int]:
        """The address of an array that describes the cache's memory, and the entries that it has."""
        return address_of(self._stacks), len(self._stacks) // STACK_WORDS

    def arrays(self, first_layer: int) -> tuple[int, int]:
        """The addresses of the two arrays from one layer on."""
        keys, values = self._places
        return keys + self._keys.itemsize * first_layer, values + self._values.itemsize * first_layer


class NativeAttention:
    """Implements `Attention`; a row's position must be its place in its text.

    Engines in several threads may share one: it keeps addresses for each cache, as long as the cache lives.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self._addresses: WeakKeyDictionary[KVCache, CacheAddresses] = WeakKeyDictionary()

    def begin(self, batch: ForwardBatch, cache: KVCache) -> NativePass:
        """Gather the addresses that all layers of a pass share."""
        return NativePass(self.kernels, batch, cache, self.addresses(cache))

    def move(self, cache: KVCache, sources: Iterable[int], destinations: Iterable[int]) -> None:
        """`KVCache.move`, of slots that are still integers.

        Raises:
            ValueError: a slot is none of the cache, or there are more of one kind than of the other.
        """
        first, second = array("q", sources), array("q", destinations)
        if len(first) != len(second):
            raise ValueError(f"got {len(first)} sources for {len(second)} destinations; must be as many")
        self.kernels.move_slots(*self.addresses(cache).stacks, address_of(first), address_of(second), len(first))

    def addresses(self, cache: KVCache) -> CacheAddresses:
        """Where a cache's keys and values are."""
        addresses = self._addresses.get(cache)
        if addresses is None:  # asking every tensor for its address takes long, so it is done once per cache
            addresses = self._addresses[cache] = CacheAddresses(cache)
        return addresses


class NativePass:
    """`Attend` for one pass of `batch` over `cache`; `struct` and `addresses` are what a call of whole layers reads.

    `sequences` [S, SEQUENCE_WORDS] (int64) is in `struct`, and has the addresses of each sequence's `tables` and `masks`.
    """

    def __init__(self, kernels: Kernels, batch: ForwardBatch, cache: KVCache, addresses: CacheAddresses) -> None:
        self.cache = cache
        self.addresses = addresses
        self._kernels = kernels
        self.batch = batch  # keeps the tensors alive whose addresses are in the struct
        self.masks = [
            None if sequence.tree_mask is None else sequence.tree_mask.contiguous() for sequence in batch.sequences
        ]
        self.tables = [block_table(sequence.block_ids) for sequence in batch.sequences]
        self.sequences = array("q")  # `Sequence` of csrc/attention.h
        first_row = num_positions = 0
        for sequence, table, mask in zip(batch.sequences, self.tables, self.masks, strict=True):
            self.sequences.extend(
                (
                    first_row,
                    sequence.num_context,
                    sequence.num_rows,
                    address_of(table),
                    0 if mask is None else mask.data_ptr(),
                    0 if mask is None else mask.shape[1],
                    sequence.num_hidden,
                )
            )
            first_row += sequence.num_rows
            num_positions = max(num_positions, sequence.num_context + sequence.num_rows)
        self.num_positions = num_positions  # no row's is as high
        if batch.slot_mapping.numel() != first_row:
            raise ValueError(f"slot_mapping: got {len(batch.slot_mapping)} slots; the sequences have {first_row} rows")
        self.struct = PassStruct(
            num_rows=first_row,
            slots=int64_address(batch.slot_mapping),
            num_sequences=len(batch.sequences),
            sequences=address_of(self.sequences),
            block_size=batch.block_size,
        )

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
        kv = self.cache.layers[layer]
        dtype = kv.key.dtype
        num_rows, key_shape, value_shape = self.struct.num_rows, kv.key.shape[1:], kv.value.shape[1:]
        widths = (query.shape[2], key.shape[1:], value.shape[1:])
        if widths != (key_shape[1], key_shape, value_shape) or {len(query), len(key), len(value)} != {num_rows}:
            raise ValueError(
                f"query, key, value: got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}; layer {layer} "
                f"of the cache takes {num_rows} rows of keys {list(key_shape)} and values {list(value_shape)}"
            )
        rows = [x.to(dtype).contiguous() for x in (query, key, value)]
        sinks = None if sinks is None else sinks.float().contiguous()
        shape = AttentionStruct(
            num_heads=query.shape[1],
            num_kv_heads=key_shape[0],
            key_dim=key_shape[1],
            value_dim=value_shape[1],
            scale=scale,
            soft_cap=soft_cap or 0.0,
            window=window or 0,
            sinks=None if sinks is None else sinks.data_ptr(),
        )
        out = torch.empty(*query.shape[:2], value.shape[2], dtype=dtype)
        self._kernels.attention(
            self.struct,
            shape,
            STORAGE[dtype],
            *(x.data_ptr() for x in rows),
            kv.key.data_ptr(),
            kv.value.data_ptr(),
            out.data_ptr(),
        )
        return out.to(query.dtype)


def int64_address(numbers: Tensor) -> int:
    """Where int64 numbers lie, one behind the other."""
    if numbers.dtype != torch.int64 or not numbers.is_contiguous():
        raise ValueError(f"got {numbers.dtype} of strides {numbers.stride()}; must be contiguous int64")
    return numbers.data_ptr()


def block_table(block_ids: npt.NDArray[np.int32]) -> array[int]:
    """A copy of a sequence's blocks for the kernels, whose address is at hand; NumPy's own takes longer than the copy."""
    table = array("i", block_ids.tobytes())
    if len(table) != len(block_ids):
        raise ValueError(f"block_ids: got {block_ids.dtype}; must be int32")
    return table


def rotation_structs(rotations: list[Rotation | None]) -> Array[RotationStruct]:
    """Addresses of contiguous fp32 cosines and sines [T, 1, half] of each rotation; zeros for None, a layer without positions."""
    return (RotationStruct * len(rotations))(
        *(RotationStruct() if rotation is None else rotation_struct(rotation) for rotation in rotations)
    )


def rotation_struct(rotation: Rotation) -> RotationStruct:
    """Addresses of contiguous fp32 cosines and sines [T, 1, half]."""
    return RotationStruct(cos=rotation.cos.data_ptr(), sin=rotation.sin.data_ptr(), half=rotation.cos.shape[-1])
