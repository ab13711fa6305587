"""Which device computes, and what is said where it cannot."""

from __future__ import annotations

import re

import pytest
import torch

from forerun.config import settings as settings_module
from forerun.config.device import check_triton, choose_device
from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError
from forerun.ops.cuda.system import InstalledCuda
from tests.gpus import A100, H200, T4, FakeCuda

UNFIT = {
    "torch without CUDA": (
        FakeCuda(torch="2.13.0+cpu", torch_cuda=None, gpus=[]),
        r"torch 2\.13\.0\+cpu is built without CUDA; install its CUDA build",
    ),
    "no driver": (FakeCuda(driver_cuda=None, gpus=[]), "no NVIDIA driver is found; install one"),
    "old driver": (
        FakeCuda(driver_cuda=(12, 4), gpus=[]),
        r"the NVIDIA driver runs CUDA 12\.4 at most and torch 2\.13\.0\+cu130 is built for CUDA 13\.0; update the driver",
    ),
    "no GPU": (FakeCuda(gpus=[]), "the driver shows no GPU; look what nvidia-smi lists"),
    "old GPU": (FakeCuda(gpus=[T4]), r"Tesla T4 has compute capability 7\.5 and 8\.0 \(Ampere\) is the least"),
}


@pytest.fixture(autouse=True)
def _all_gpus_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
@pytest.mark.parametrize("gpu", [A100, H200])
def test_a_gpu_that_is_fit_is_taken(name, gpu, caplog):
    assert choose_device(name, FakeCuda(gpus=[gpu])).type == "cuda"
    assert caplog.records == []


@pytest.mark.parametrize(("system", "reason"), UNFIT.values(), ids=UNFIT)
def test_a_gpu_that_cannot_be_used_is_refused_with_what_to_do(system, reason):
    with pytest.raises(ConfigError, match=f"device: got 'cuda', but {reason}.*, or set device='cpu'"):
        choose_device("cuda", system)


@pytest.mark.parametrize(("system", "reason"), [UNFIT["old GPU"], UNFIT["old driver"], UNFIT["no GPU"]])
def test_auto_says_why_it_does_not_take_the_gpu(system, reason, caplog):
    for _ in range(2):
        assert choose_device("auto", system) == torch.device("cpu")
    (warning,) = caplog.records

    assert re.search(f"device: 'auto' takes the CPU, since {reason}", warning.getMessage())


def test_auto_is_silent_where_there_is_no_gpu_or_the_user_hides_it(monkeypatch, caplog):
    assert choose_device("auto", FakeCuda(driver_cuda=None, torch_cuda=None, gpus=[])).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto", FakeCuda(gpus=[])).type == "cpu"
    assert caplog.records == []


def test_gpus_that_the_environment_hides_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError, match=r"shows no GPU \(CUDA_VISIBLE_DEVICES is '7'\)"):
        choose_device("cuda", FakeCuda(gpus=[]))


def test_the_number_of_a_gpu_that_is_not_there_is_refused_with_those_that_are():
    assert choose_device("cuda:1", FakeCuda(gpus=[H200, A100])) == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="got 'cuda:2', but there are 2 GPUs; take one of cuda:0 to cuda:1"):
        choose_device("cuda:2", FakeCuda(gpus=[H200, A100]))


def test_a_number_beyond_what_torch_counts_is_not_another_gpus():
    with pytest.raises(ConfigError, match="got 'cuda:256', but there is 1 GPU; take cuda:0, or set device='cpu'"):
        choose_device("cuda:256", FakeCuda(gpus=[H200]))


@pytest.mark.parametrize("name", ["cuda:-1", "cuda:01", "cuda:", "cuda1", "gpu", "mps", "cpu:1", "CUDA", ""])
def test_a_name_that_is_no_device_is_refused_with_those_that_are(name):
    with pytest.raises(ConfigError, match=re.escape(f"device: got {name!r}; may be auto, cpu, cuda or cuda:N")):
        choose_device(name, FakeCuda(gpus=[H200]))


def test_a_second_gpu_is_judged_by_itself():
    with pytest.raises(ConfigError, match="Tesla T4"):
        choose_device("cuda:1", FakeCuda(gpus=[H200, T4]))


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_a_tested_triton_is_taken_in_silence(version, caplog):
    check_triton(FakeCuda(triton=version), needed_by="device_step")
    assert caplog.records == []


def test_an_untested_triton_is_warned_of_once(caplog):
    for _ in range(2):
        check_triton(FakeCuda(triton="3.65.0"), needed_by="device_step")
    (warning,) = caplog.records
    assert "triton 3.65.0 is not tested" in warning.getMessage()
    assert "3.6 and 3.7" in warning.getMessage()


def test_kernels_without_triton_are_refused_by_the_settings_that_need_them(monkeypatch):
    monkeypatch.setattr(settings_module, "InstalledCuda", lambda: FakeCuda(triton=None))
    assert EngineSettings(model="m", device="cuda").torch_device.type == "cuda"
    with pytest.raises(ConfigError, match=r"device_step: .* needs triton, .* pip install 'forerun\[cuda\]'"):
        _ = EngineSettings(model="m", device="cuda", device_step=True).torch_device


def test_what_is_installed_here_can_be_asked():
    system = InstalledCuda()
    assert system.torch == torch.__version__
    assert system.num_gpus == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert system.driver_cuda is None or system.driver_cuda >= (8, 0)
