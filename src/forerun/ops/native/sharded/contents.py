"""Parts of a drafter's layers and head as rank 0 hands them to the other ranks, in bytes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from forerun.core.batch import LayerKVSpec
from forerun.ops.native.formats.base import PackedWeight
from forerun.ops.native.layers import NativeLayer, NativeLayers
from forerun.ops.native.library import Kernels
from forerun.ops.native.sharded.layers import LayersPart
from forerun.ops.native.structs import LayerShardStruct, LayerStruct

MakeTensor = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersContent:
    """One rank's part of some layers: of each `LayerStruct` its bytes, weights and norms; `kv_specs` of its heads alone."""

    layers: Sequence[tuple[bytes, Mapping[str, PackedWeight], Mapping[str, Tensor]]]
    rotation_of: Sequence[int]
    shard: LayerShardStruct
    kv_specs: Sequence[LayerKVSpec]

    @classmethod
    def of(
        cls,
        layers: Sequence[NativeLayer],
        rotation_of: Sequence[int],
        shard: LayerShardStruct,
        kv_specs: Sequence[LayerKVSpec],
    ) -> LayersContent:
        """The content of layers that are a rank's part already."""
        contents = [(bytes(layer.struct), layer.weights, layer.norms) for layer in layers]
        return cls(layers=contents, rotation_of=rotation_of, shard=shard, kv_specs=kv_specs)

    def part(self, kernels: Kernels) -> LayersPart:
        """The part, with addresses of this process."""
        layers = [
            NativeLayer(struct=LayerStruct.from_buffer_copy(struct), weights=weights, norms=norms)
            for struct, weights, norms in self.layers
        ]
        return LayersPart(NativeLayers(kernels, layers, self.rotation_of), self.shard)


def to_bytes(content: object) -> bytes:
    """Pickle a `LayersContent` or a `HeadPart`; of its tensors only what they show of their memory."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
    return stream.getvalue()


def from_bytes(content: bytes, make_tensor: MakeTensor) -> Any:
    """The twin of `to_bytes`; tensors are written into what `make_tensor(shape, dtype)` gives."""
    return _Unpickler(io.BytesIO(content), make_tensor).load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> Any:
        if isinstance(obj, Tensor):
            return obj.dtype, tuple(obj.shape), obj.cpu().contiguous().flatten().view(torch.uint8).numpy()
        if isinstance(obj, PackedWeight):  # its struct has addresses
            return {field.name: getattr(obj, field.name) for field in fields(obj) if field.init}
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, make_tensor: MakeTensor) -> None:
        super().__init__(stream)
        self._make_tensor = make_tensor

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, dict):
            return PackedWeight(**pid)
        dtype, shape, values = pid
        tensor = self._make_tensor(shape, dtype)
        tensor.flatten().view(torch.uint8).copy_(torch.from_numpy(values))
        return tensor
