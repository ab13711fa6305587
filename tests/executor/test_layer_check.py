"""Layers on the device are compared with torch's before they are used unasked."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from pathlib import Path

import pytest
import torch

from forerun import SamplingParams, build
from forerun.errors import DeviceLostError
from forerun.executor.device_choice import with_layers_on_device
from forerun.executor.layer_check import layers_differ
from forerun.executor.local import LocalExecutor
from forerun.models.base import LoadedTarget
from forerun.models.loader import load_model
from tests.engines import tiny_llm
from tests.tiny_models import save_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def on_device(dtype=torch.float32, *, max_length=64):
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_model(Path(folder), "LlamaForCausalLM", seed=1)
        model = load_model(path, dtype=dtype, device=torch.device("cpu"))
    plain = LoadedTarget(model=model, tokenizer=None, eos_token_ids=frozenset())
    return plain, with_layers_on_device(plain, max_length=max_length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_compute_the_same_agree(dtype):
    assert layers_differ(*on_device(dtype)) is None


def test_where_texts_are_short_the_one_that_is_compared_is_too():
    """A place that no text has has no rotation: to read it would lose a GPU."""
    assert layers_differ(*on_device(max_length=5)) is None


def test_layers_with_a_fault_do_not():
    plain, target = on_device()
    whole = target.attention.functions.attend

    def shifted(query, keys, values, output, *rest, **options):
        """One key head too far."""
        whole(query, keys.roll(1, dims=1), values, output, *rest, **options)

    target.attention.functions = target.attention.functions._replace(attend=shifted)
    assert "their logits differ from torch's by" in layers_differ(plain, target)


def test_layers_that_fail_do_not():
    plain, target = on_device()

    class Failing:
        def begin(self, batch, cache):
            raise RuntimeError("ptxas fatal: no such instruction\nmore of it")

    assert layers_differ(plain, dataclasses.replace(target, attention=Failing())) == (
        "they fail (ptxas fatal: no such instruction)"
    )


def test_a_device_that_is_lost_meanwhile_is_lost_for_torch_too():
    plain, target = on_device()

    class Lost:
        def begin(self, batch, cache):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(DeviceLostError):
        layers_differ(plain, dataclasses.replace(target, attention=Lost()))


@pytest.mark.parametrize("is_faulty", [False, True])
def test_an_engine_that_was_not_asked_falls_back_on_torch_and_says_why(is_faulty, monkeypatch, caplog):
    monkeypatch.setattr(build, "steps_on_device", lambda *_: True)
    if is_faulty:
        monkeypatch.setattr(build, "layers_differ", lambda *_: "their logits differ")
    with caplog.at_level(logging.WARNING):
        llm = tiny_llm()
    assert (type(llm.executor) is LocalExecutor) == is_faulty
    assert ("their logits differ" in caplog.text) == is_faulty
    expected = tiny_llm().generate([[3, 1, 4]], GREEDY, use_tqdm=False)
    assert llm.generate([[3, 1, 4]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_layers_that_are_asked_for_are_not_compared(monkeypatch):
    monkeypatch.setattr(build, "layers_differ", lambda *_: pytest.fail("compared"))
    tiny_llm(device_step=True)
