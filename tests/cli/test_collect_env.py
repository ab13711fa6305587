"""`forerun collect-env`."""

from __future__ import annotations

import json
import platform

import pytest

from forerun.cli.app import main
from forerun.cli.collect_env import gpu_facts
from forerun.config.kernel_table import table_file
from forerun.ops.cuda.tiles import Tiles, TileTable
from tests.gpus import A100, H200, T4, FakeCuda


def test_json_has_these_sections_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env", "--json"]) == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    assert list(json.loads(output)) == ["versions", "system", "cpu", "memory", "gpu", "models"]


def test_text_tells_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    main(["collect-env"])
    output = capsys.readouterr().out
    assert f"python: {platform.python_version()}" in output
    assert "torch: " in output


def test_environment_variables_and_host_name_stay_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_print")
    monkeypatch.setattr(platform, "node", lambda: "host-do-not-print")
    main(["collect-env"])
    assert "do_not_print" not in capsys.readouterr().out
    assert "do-not-print" not in capsys.readouterr().out


def test_gpus_are_told_with_what_would_compute_on_them(tmp_path):
    table = TileTable(gpu=H200.name, capability=H200.capability, triton="3.7.1", tiles={(64, 64): Tiles(32, 64, 1)})
    path = table_file(tmp_path, H200, "3.7.1")
    table.write(path)
    facts = gpu_facts(FakeCuda(gpus=[H200, A100, T4]), folder=tmp_path)
    assert facts == {
        "torch_cuda": "13.0",
        "driver_cuda": "13.0 at most",
        "cuda:0": "NVIDIA H200, 141.0 GiB, capability 9.0",
        "cuda:0 kernel table": f"{path} (1 shape, digest {table.digest})",
        "cuda:1": "NVIDIA A100, 80.0 GiB, capability 8.0",
        "cuda:1 kernel table": "none, the built-in rule",
        "cuda:2": "Tesla T4, 16.0 GiB, capability 7.5",
        "cuda:2 cannot be used": (
            "device: got 'cuda:2', but Tesla T4 has compute capability 7.5 and 8.0 (Ampere) is the least; take a newer GPU, "
            "or set device='cpu'"
        ),
        "kernels": "triton 3.7.1 where they can compute the model, else torch",
        "cuda_graphs": "on where triton's kernels compute, unless enforce_eager",
    }


def test_a_damaged_table_is_told_instead_of_hidden(tmp_path):
    path = table_file(tmp_path, H200, "3.7.1")
    path.parent.mkdir()
    path.write_text("{")
    assert "is no table of tiles or damaged" in gpu_facts(FakeCuda(), folder=tmp_path)["cuda:0 cannot be used"]


def test_without_a_gpu_only_the_versions_are_told(tmp_path):
    facts = gpu_facts(FakeCuda(torch_cuda=None, driver_cuda=None, gpus=[]), folder=tmp_path)
    assert facts == {"torch_cuda": "none", "driver_cuda": "none"}
