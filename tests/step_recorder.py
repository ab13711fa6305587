"""A stand-in for CUDA graphs on a CPU."""

from __future__ import annotations

from dataclasses import fields

import torch

from forerun.core.batch import CandidateTensors
from forerun.executor.step_graphs import Recorded

SIZES = [1, 2, 4, 8, 12, 16, 24, 32]


class ClosureRecorder:
    """Stands for CUDA graphs: calls again what was recorded, with the arguments of then, and writes its outputs to their first places."""

    def __init__(self, fails_at=None):
        self.num_recorded = self.num_replayed = 0
        self.fails_at = fails_at

    def record(self, function):
        self.num_recorded += 1
        if self.num_recorded == self.fails_at:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")
        outputs = function()

        def replay():
            self.num_replayed += 1
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
