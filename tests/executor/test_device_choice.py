"""Where the device computes the steps: as asked, or by default on a GPU whose kernels can compute all of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from types import SimpleNamespace

import pytest
import torch

from forerun.executor.device_choice import steps_on_device, with_layers_on_device
from forerun.models.on_device import obstacle
from forerun.verify.matching import MatchingConfig
from forerun.verify.rejection import RejectionConfig
from tests.engines import tiny_target


@pytest.fixture
def on_gpu(monkeypatch):
    """A target that says it is on a GPU, where triton is installed."""
    model = tiny_target().model.first_layers(3)
    model.device = torch.device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    return dataclasses.replace(tiny_target(), model=model)


@pytest.mark.parametrize("asked", [True, False])
def test_what_is_asked_for_is_done(asked, on_gpu):
    assert steps_on_device(asked, on_gpu, RejectionConfig()) == asked
    assert steps_on_device(asked, tiny_target(), MatchingConfig()) == asked


def test_by_default_a_gpu_computes_its_steps_and_a_cpu_does_not(on_gpu):
    assert steps_on_device(None, on_gpu, MatchingConfig())
    assert not steps_on_device(None, tiny_target(), MatchingConfig())


def test_a_target_whose_layers_were_given_to_the_device_is_computed_there_again(on_gpu, monkeypatch):
    """As in `LLM.with_speculation`, which gives another engine the target of the first."""
    target = with_layers_on_device(tiny_target(), max_length=128)
    monkeypatch.setattr(target.model, "device", torch.device("cuda"))
    assert obstacle(target.model) is not None, "it could not be asked by its layers"
    assert steps_on_device(None, target, MatchingConfig())
    assert not steps_on_device(None, target, RejectionConfig())


@pytest.mark.parametrize("reason", ["several processes", "triton", "matching", "float64"])
def test_the_log_says_why_a_gpu_does_not(reason, on_gpu, monkeypatch, caplog):
    target, verifier = on_gpu, MatchingConfig()
    if reason == "several processes":
        target = dataclasses.replace(target, ranks=SimpleNamespace(num_ranks=2))
    elif reason == "triton":
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    elif reason == "matching":
        verifier = RejectionConfig()
    else:
        target.model.dtype = torch.float64
    with caplog.at_level(logging.INFO):
        assert not steps_on_device(None, target, verifier)
    assert reason in caplog.text


def test_a_target_that_the_functions_cannot_compute_keeps_its_layers_and_the_log_says_why(caplog):
    target = tiny_target()
    model = target.model.first_layers(3)
    model.dtype = torch.float64
    target = dataclasses.replace(target, model=model)
    assert obstacle(model)
    with caplog.at_level(logging.INFO):
        assert with_layers_on_device(target, max_length=64) is target
    assert "float64" in caplog.text


def test_layers_are_handed_over_once():
    once = with_layers_on_device(tiny_target(), max_length=64)
    assert once.on_device is not None
    assert with_layers_on_device(once, max_length=64) is once
