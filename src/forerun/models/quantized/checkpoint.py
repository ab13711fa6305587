"""A checkpoint that others have quantized, as whole weights under their usual names."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

from torch import Tensor

from forerun.errors import ModelError
from forerun.models.quantized.layout import QuantizedLayout, TensorSource
from forerun.ops.block_weight import BlockWeight


class QuantizedCheckpoint:
    """A `Checkpoint` that makes one weight of the several tensors in which each is stored.

    "layers.0.mlp.up_proj.qweight", "....scales" and so on become "layers.0.mlp.up_proj.weight", as do
    "layers.0.mlp.experts.down_proj_blocks" and "..._scales"; all other tensors stay.
    """

    def __init__(self, checkpoint: TensorSource, layout: QuantizedLayout) -> None:
        """Find the quantized modules by the names of tensors.

        Raises:
            ModelError: a module lacks a part without which its weight means nothing, or a part has no shape of its kind.
        """
        self._checkpoint = checkpoint
        self._layout = layout
        self.facts = replace(checkpoint.facts, is_mixed=True)
        self._kinds = {**layout.optional, **layout.needed}
        names = checkpoint.names()
        part = re.compile(rf"(?P<module>.+)[._](?P<suffix>{'|'.join(self._kinds)})")
        places = {name: (found["module"], found["suffix"]) for name in names if (found := part.fullmatch(name))}
        modules = {module for module, suffix in places.values() if suffix == layout.main}
        self._parts: dict[str, dict[str, str]] = defaultdict(dict)  # weight -> suffix -> tensor
        for name, (module, suffix) in places.items():
            if module in modules:
                self._parts[f"{module}.weight"][suffix] = name
        taken = {name for parts in self._parts.values() for name in parts.values()}
        self._names = (names - taken) | self._parts.keys()
        for weight, parts in sorted(self._parts.items()):
            absent = sorted(layout.needed.keys() - parts.keys())
            if absent:
                raise ModelError(
                    f"checkpoint: {weight} is quantized, but its part {absent[0]!r} is missing; download the model again"
                )
            for suffix, stored in parts.items():
                self._kinds[suffix].check_shape(weight, suffix, checkpoint.shape(stored))

    def names(self) -> frozenset[str]:
        """See `Checkpoint`."""
        return frozenset(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint`."""
        parts = self._parts.get(name)
        if parts is None:
            return self._checkpoint.shape(name)
        return self._layout.shape({suffix: self._checkpoint.shape(stored) for suffix, stored in parts.items()})

    def load(self, name: str) -> Tensor | BlockWeight:
        """See `Checkpoint`.

        Raises:
            ModelError: a part of the weight is of a wrong dtype or does not fit the others, or its values have no block format.
        """
        parts = self._parts.get(name)
        if parts is None:
            return self._checkpoint.load(name)
        loaded = {suffix: self._checkpoint.load(stored) for suffix, stored in parts.items()}
        for suffix, tensor in loaded.items():
            self._kinds[suffix].check_dtype(name, suffix, tensor.dtype)
        return self._layout.load(name, loaded)
