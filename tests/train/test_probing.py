"""The rate of training is that of steps that are computed, not of those that a GPU was only told of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forerun.train.eagle3_trainer import StepReport
from forerun.train.probing import training_rate


class TrainerOnAGPU:
    """Each step is called in 10 ms and computed in a second, when somebody waits for it."""

    def __init__(self):
        self.now = self.waiting = 0.0
        self.num_tokens = 0

    def run_step(self):
        self.now += 0.01
        self.waiting += 1.0
        self.num_tokens += 100
        return StepReport(step=1, num_tokens=100, total=self, acceptance=[], agreement=[])

    def item(self):
        self.now += self.waiting
        self.waiting = 0.0

    def tensors(self):
        return {}


def test_a_gpu_is_waited_for_before_and_after_the_steps_that_are_timed(monkeypatch):
    trainer = TrainerOnAGPU()
    monkeypatch.setattr("forerun.train.probing.time", SimpleNamespace(monotonic=lambda: trainer.now))
    rate, _ = training_rate(trainer, num_steps=4)
    assert rate == pytest.approx(400 / 4.04)
