"""Reads a checkpoint's tensors by name, and checks that they are those that the model expects."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.ops.layers import Linear

HARMLESS_SURPLUS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")  # recomputed from the configuration


Rename = Callable[[str], str]
"""Maps the stored name of a tensor to the name that its reader uses."""


class Checkpoint(Protocol):
    """Tensors by name, loaded one at a time."""

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, without loading it."""
        ...

    def load(self, name: str) -> Tensor:
        """Load one tensor, on the CPU, in the dtype in which it is stored."""
        ...


class StateDict:
    """A `Checkpoint` whose tensors are all in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def load(self, name: str) -> Tensor:
        """Return the tensor itself, not a copy."""
        return self._tensors[name]


class CheckpointView:
    """A `Checkpoint` of some of another's tensors under other names: name -> stored name."""

    def __init__(self, checkpoint: Checkpoint, stored: Mapping[str, str]) -> None:
        self._checkpoint = checkpoint
        self._stored = stored

    def names(self) -> frozenset[str]:
        """See `Checkpoint`."""
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint`."""
        return self._checkpoint.shape(self._stored[name])

    def load(self, name: str) -> Tensor:
        """See `Checkpoint`."""
        return self._checkpoint.load(self._stored[name])

    def split(self, prefix: str) -> tuple[CheckpointView, CheckpointView]:
        """Return a view of the tensors whose names begin with `prefix`, and one of the others."""
        inside = {own: stored for own, stored in self._stored.items() if own.startswith(prefix)}
        outside = {own: stored for own, stored in self._stored.items() if own not in inside}
        return CheckpointView(self._checkpoint, inside), CheckpointView(self._checkpoint, outside)


def renamed(checkpoint: Checkpoint, rename: Rename) -> CheckpointView:
    """Return a view of all tensors of a checkpoint under other names.

    Raises:
        ModelError: two tensors get the same name.
    """
    stored: dict[str, str] = {}
    for name in sorted(checkpoint.names()):
        own = rename(name)
        if own in stored:
            raise ModelError(f"checkpoint: tensors {stored[own]!r} and {name!r} are for the same place")
        stored[own] = name
    return CheckpointView(checkpoint, stored)


class WeightReader:
    """Reads a model's tensors, in its dtype and on its device, and notes which have been read."""

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._checkpoint = checkpoint
        self._names = checkpoint.names()
        self._unread = set(self._names)

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that the checkpoint has."""
        return self._checkpoint.shape(name)

    def tensor(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> Tensor:
        """Load one tensor, in the model's dtype if `dtype` is None.

        Raises:
            ModelError: it is missing or has another shape.
        """
        return self._load(name, shape).to(self.device, dtype or self.dtype, copy=True)

    def linear(self, names: Sequence[str], rows: Sequence[int], *, width: int, bias: bool) -> Linear:
        """Load projections of the same input, stored under `names` with `rows` outputs each, as one matrix.

        Raises:
            ModelError: a part is missing or has another shape.
        """
        weight = torch.empty(sum(rows), width, dtype=self.dtype, device=self.device)
        for name, end, count in zip(names, accumulate(rows), rows, strict=True):
            weight[end - count : end].copy_(self._load(f"{name}.weight", (count, width)))
        if not bias:
            return Linear(weight)
        biases = [self.tensor(f"{name}.bias", (count,)) for name, count in zip(names, rows, strict=True)]
        return Linear(weight, torch.cat(biases))

    def tie(self, name: str, tensor: Tensor) -> None:
        """Accept a stored copy, if there is one, of a weight that the configuration ties to `tensor`.

        Raises:
            ModelError: the copy differs.
        """
        if name in self._unread and not torch.equal(self.tensor(name, tuple(tensor.shape)), tensor):
            raise ModelError(
                f"{name}: differs from the embedding, but the configuration ties the two; set tie_word_embeddings to false"
            )

    def finish(self, unused_prefixes: tuple[str, ...] = ()) -> None:
        """Check that every tensor was read, except those of `unused_prefixes` and known harmless ones.

        Raises:
            ModelError: the checkpoint has tensors that the model has no place for.
        """
        surplus = sorted(
            name
            for name in self._unread
            if not HARMLESS_SURPLUS.fullmatch(name) and not name.startswith(unused_prefixes)
        )
        if surplus:
            more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
            raise ModelError(
                f"checkpoint: got surplus tensor {surplus[0]!r}{more}; the configuration has no place for it; "
                "use the config.json that belongs to these weights"
            )

    def _load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._names:
            raise ModelError(
                f"checkpoint: tensor {name!r} is missing, expected shape {list(shape)}; download the model again"
            )
        found = self._checkpoint.shape(name)
        if found != shape:
            raise ModelError(
                f"checkpoint: tensor {name!r} has shape {list(found)}, expected {list(shape)}; "
                "use the config.json that belongs to these weights"
            )
        self._unread.discard(name)
        return self._checkpoint.load(name)
