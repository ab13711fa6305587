"""A stand-in for CUDA graphs on a CPU."""

from __future__ import annotations

from dataclasses import fields

import torch

from forerun.core.batch import CandidateTensors
from forerun.executor.step_graphs import Recorded

SIZES = [1, 2, 4, 8, 12, 16, 24, 32]


class ClosureRecorder:
    """Stands for CUDA graphs: calls again what was recorded, with the arguments of then, and writes its outputs to their first places.

    The recordings whose numbers, from 1 on, are in `fails_at` fail. `replayed` lists the number of each that was replayed.
    """

    def __init__(self, fails_at=()):
        self.num_recorded = 0
        self.replayed = []
        self.fails_at = fails_at

    @property
    def num_replayed(self):
        return len(self.replayed)

    def record(self, function):
        number = self.num_recorded = self.num_recorded + 1
        if number in self.fails_at:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")
        outputs = function()

        def replay():
            self.replayed.append(number)
            for place, found in zip(tensors_of(outputs), tensors_of(function()), strict=True):
                place.copy_(found)

        return Recorded(outputs, replay)


def tensors_of(outputs):
    values = [getattr(outputs, field.name) for field in fields(outputs)]
    found = [value for value in values if isinstance(value, torch.Tensor)]
    for value in values:
        if isinstance(value, CandidateTensors):
            found += [value.token_ids, value.logits]
    return found
