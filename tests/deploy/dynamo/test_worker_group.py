"""Workers that would not write the same bits are not of one group."""

from __future__ import annotations

import pytest
import torch

from forerun.config.kernel_table import table_file
from forerun.deploy.dynamo import worker_group
from forerun.deploy.dynamo.worker_group import text_configuration
from forerun.ops.cuda import system
from forerun.ops.cuda.tiles import Tiles, TileTable
from tests.engines import native_target, tiny_llm
from tests.gpus import H200, FakeCuda
from tests.native import KERNELS


def test_each_way_to_compute_the_layers_is_a_group_of_its_own():
    llms = [
        tiny_llm(),
        tiny_llm(device_step=True),
        tiny_llm(device_step=True, device_matmul="torch"),
        tiny_llm(tensor_parallel_size=2),
    ]
    found = [text_configuration(llm) for llm in llms]
    assert all(found.count(one) == 1 for one in found)


def test_other_defaults_of_sampling_make_another_group():
    usual, other = tiny_llm(), tiny_llm(override_generation_config={"temperature": 0.5})
    assert text_configuration(usual) != text_configuration(other)


def test_threads_and_limits_of_a_step_make_no_group(monkeypatch):
    usual = text_configuration(tiny_llm())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert text_configuration(tiny_llm(max_num_seqs=3)) == usual


@pytest.mark.skipif(not KERNELS, reason="the kernels are not built")
def test_the_native_kernels_write_the_same_in_any_number_of_processes():
    found = [text_configuration(tiny_llm(target=native_target(), tensor_parallel_size=count)) for count in (1, 2)]
    assert found[0] == found[1]


class OnGPU:
    """An LLM, as if a GPU computed its steps."""

    device = torch.device("cuda", 0)
    is_batch_invariant = has_device_layers = True

    def __init__(self, llm):
        self._llm = llm

    def __getattr__(self, name):
        return getattr(self._llm, name)


def test_a_group_has_one_kind_of_gpu_and_one_table_of_its_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    table = TileTable(gpu=H200.name, capability=(9, 0), triton="3.7.1", tiles={(64, 64): Tiles(32, 64, 2)})
    table.write(tmp_path / "own.json")

    def configuration(*, gpu=H200.name, triton="3.7.1", **settings):
        for module in (system, worker_group):
            monkeypatch.setattr(module, "InstalledCuda", lambda: FakeCuda(triton=triton))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
        return text_configuration(OnGPU(tiny_llm(**settings)))

    found = [
        configuration(),
        configuration(gpu="NVIDIA A100"),
        configuration(triton="3.6.0"),
        configuration(kernel_table=tmp_path / "own.json"),
    ]
    assert all(found.count(one) == 1 for one in found)
    table.write(table_file(tmp_path, H200, "3.7.1"))
    assert configuration() == found[3], "the same table, wherever it lies"
