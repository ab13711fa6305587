"""Tensors with a few numbers for each slot in one buffer, so that whatever new sequences need there is sent in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.executor.host_copies import to_device

ALIGNMENT = 16 // 4  # words: triton compiles a kernel again for an address that is less even


class SlotValues:
    """Views of one buffer, each with a row for each slot; what is noted for them is written by one `send`.

    Attributes:
        tensors: the views, by name, with the values that were given.

    Args:
        tensors: contiguous tensors [num_slots, ...] of 4 or 8 bytes each.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        words = {name: tensor.contiguous().view(-1).view(torch.int32) for name, tensor in tensors.items()}
        lengths = [-(-len(of_tensor) // ALIGNMENT) * ALIGNMENT for of_tensor in words.values()]
        self._firsts = dict(zip(words, np.cumsum([0, *lengths]).tolist(), strict=False))
        self._per_slot = {name: len(of_tensor) // len(tensors[name]) for name, of_tensor in words.items()}
        device = next(iter(words.values())).device
        self._buffer = torch.zeros(sum(lengths), dtype=torch.int32, device=device)
        self.tensors: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            first = self._firsts[name]
            view = self._buffer[first : first + len(words[name])]
            view.copy_(words[name])
            self.tensors[name] = view.view(tensor.dtype).view(tensor.shape)
        self._dtypes = {name: torch.empty(0, dtype=tensor.dtype).numpy().dtype for name, tensor in tensors.items()}
        self.forget()

    def forget(self) -> None:
        """Forget what was noted and not sent."""
        self._places: list[npt.NDArray[np.int32]] = []
        self._values: list[npt.NDArray[np.int32]] = []

    def note(self, name: str, slot: int, values: Any) -> None:
        """Note all values of a slot, each slot once before they are sent."""
        words = np.asarray(values, dtype=self._dtypes[name]).reshape(-1).view(np.int32)
        assert len(words) == self._per_slot[name], "all values of a slot are noted at once"
        first = self._firsts[name] + slot * len(words)
        self._places.append(np.arange(first, first + len(words), dtype=np.int32))
        self._values.append(words)

    def send(self) -> None:
        """Write what was noted, before whatever is queued on the device from now on."""
        if self._places:
            noted = np.stack([np.concatenate(self._places), np.concatenate(self._values)])
            places, values = to_device(noted, self._buffer.device)
            self._buffer[places.long()] = values
        self.forget()
