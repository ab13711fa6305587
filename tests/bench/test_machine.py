"""The description of machine and kernels beside every figure."""

from __future__ import annotations

import os
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

import forerun
from forerun import LLM
from forerun.bench import machine
from forerun.config.kernel_table import table_file
from forerun.core import cpu_name
from forerun.ops.cuda.tiles import Tiles, TileTable
from forerun.ops.native.library import KERNELS_VARIABLE, load_kernels
from tests.gpus import H200, FakeCuda
from tests.tiny_gguf import save_tiny_gguf


def test_the_line_names_processor_cores_and_versions(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name : Abacus 9000\nmodel name : Abacus 9000\n")
    monkeypatch.setattr(cpu_name, "CPUINFO", cpuinfo)
    line = machine.describe_machine(torch.device("cpu"))
    assert line.startswith(f"Abacus 9000, {os.cpu_count()} cores; ")
    assert f"forerun {forerun.__version__}, torch {version('torch')}" in line


def test_two_generations_of_one_name_are_told_apart(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(cpu_name, "CPUINFO", cpuinfo)
    for family, model in (("25", "17"), ("26", "2")):
        one = f"cpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: Abacus\nstepping\t: 1\n\n"
        cpuinfo.write_text(one + one.replace("Abacus", "Other"))
        assert cpu_name.describe_processor() == f"Abacus (family {family}, model {model})"


def test_without_kernels_torch_computes(folder, monkeypatch):
    monkeypatch.setenv(KERNELS_VARIABLE, "off")
    assert machine.describe_kernels(dummy_llm(folder)) == f"torch, {torch.get_num_threads()} threads"


@pytest.mark.skipif(load_kernels() is None, reason="the kernels are not built")
@pytest.mark.parametrize(("settings", "weights"), [({}, ""), ({"quantization": "int8"}, ", int8 weights")])
def test_kernels_are_named_by_level_weights_and_threads(folder, settings, weights):
    kernels = load_kernels()
    line = machine.describe_kernels(dummy_llm(folder, **settings))
    assert line == f"native {kernels.level}{weights}, {kernels.num_threads} threads"


@pytest.mark.skipif(load_kernels() is None, reason="the kernels are not built")
@pytest.mark.parametrize("name", ["bfloat16", "int16", "int8"])
def test_kernels_are_named_with_what_blocks_are_multiplied_with(tmp_path, name):
    path = tmp_path / "tiny.gguf"
    save_tiny_gguf(path, quantized=True)
    line = machine.describe_arithmetic(LLM(str(path), dtype="bfloat16", activation_dtype=name, max_model_len=64))
    assert line == f"native {load_kernels().level}{'' if name == 'bfloat16' else f', {name} activations'}"


def test_a_gpus_kernels_are_named_with_the_table_by_which_they_cut(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr("forerun.ops.cuda.system.InstalledCuda", FakeCuda)
    gpu = torch.device("cuda", 0)
    llm = SimpleNamespace(
        device=gpu,
        kernels=None,
        has_device_layers=True,
        settings=SimpleNamespace(device_matmul="kernels", kernel_table=None),
    )
    assert machine.describe_kernels(llm) == "Triton kernels"
    table = TileTable(gpu=H200.name, capability=H200.capability, triton="3.7.1", tiles={(64, 64): Tiles(64, 64, 2)})
    table.write(table_file(tmp_path, H200, "3.7.1"))
    assert machine.describe_kernels(llm) == f"Triton kernels, table {table.digest}"
    assert machine.kernel_table(torch.device("cpu"), None) is None
    llm.has_device_layers = False
    assert machine.describe_kernels(llm) == "torch", "which cuts by itself"


def dummy_llm(folder, **settings):
    return LLM(folder, load_format="dummy", max_model_len=256, num_gpu_blocks_override=64, **settings)
