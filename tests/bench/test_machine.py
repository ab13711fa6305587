"""The description of machine and kernels beside every figure."""

from __future__ import annotations

import os

import pytest
import torch

import forerun
from forerun import LLM
from forerun.bench import machine
from forerun.core import cpu_name
from forerun.ops.native.library import KERNELS_VARIABLE, load_kernels


def test_the_line_names_processor_cores_and_versions(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name : Abacus 9000\nmodel name : Abacus 9000\n")
    monkeypatch.setattr(cpu_name, "CPUINFO", cpuinfo)
    line = machine.describe_machine(torch.device("cpu"))
    assert line.startswith(f"Abacus 9000, {os.cpu_count()} cores; ")
    assert f"forerun {forerun.__version__}, torch {torch.__version__}" in line


def test_without_kernels_torch_computes(folder, monkeypatch):
    monkeypatch.setenv(KERNELS_VARIABLE, "off")
    assert machine.describe_kernels(dummy_llm(folder)) == f"torch, {torch.get_num_threads()} threads"


@pytest.mark.skipif(load_kernels() is None, reason="the kernels are not built")
@pytest.mark.parametrize(("settings", "weights"), [({}, ""), ({"quantization": "int8"}, ", int8 weights")])
def test_kernels_are_named_by_level_weights_and_threads(folder, settings, weights):
    kernels = load_kernels()
    line = machine.describe_kernels(dummy_llm(folder, **settings))
    assert line == f"native {kernels.level}{weights}, {kernels.num_threads} threads"


def dummy_llm(folder, **settings):
    return LLM(folder, load_format="dummy", max_model_len=256, num_gpu_blocks_override=64, **settings)
