"""`forerun tune-kernels`, with a meter that is made up."""

from __future__ import annotations

import json

import pytest

from forerun.cli.app import main
from forerun.cli.tune_kernels import tune_model
from forerun.errors import ConfigError
from forerun.ops.cuda.tiles import Tiles, TileTable
from tests.bench.test_kernel_tuning import FakeMeter
from tests.gpus import H200, FakeCuda
from tests.tiny_models import save_tiny_model

BEST = Tiles(32, 64, 1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return save_tiny_model(tmp_path / "model", seed=1, vocab_size=97)


def tuned(folder, times, **options):
    return tune_model(
        folder, FakeMeter(times, noise=0.0), FakeCuda(), **({"index": 0, "output": None, "rounds": 1} | options)
    )


def test_the_table_lies_where_engines_on_this_gpu_look(folder, tmp_path, capsys):
    told = tuned(folder, {BEST: 5.0})
    path = tmp_path / "cache" / "kernel-tables" / "nvidia-h200-triton-3.7.1.json"
    table = TileTable.read(path)
    table.check_fits(H200, "3.7.1", source="here")
    assert set(table.tiles.values()) == {BEST}
    assert told == {
        "file": str(path),
        "digest": table.digest,
        "gpu": "NVIDIA H200",
        "triton": "3.7.1",
        "num_shapes": len(table.tiles),
    }
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("97 x 48: 32 outputs, 64 inputs, 1 parts (100% faster than the rule's)")


def test_shapes_of_another_model_stay_and_those_of_this_one_are_found_anew(folder, tmp_path):
    path = tmp_path / "own.json"
    other, same = (123, 48), (97, 48)
    TileTable(gpu=H200.name, capability=H200.capability, triton="3.7.1", tiles={other: BEST, same: BEST}).write(path)
    tuned(folder, {}, output=path)  # nothing is better than the rule
    assert TileTable.read(path).tiles == {other: BEST}


def test_a_file_for_another_gpu_is_not_overwritten(folder, tmp_path):
    path = tmp_path / "own.json"
    TileTable(gpu="NVIDIA H100", capability=(9, 0), triton="3.7.1", tiles={}).write(path)
    before = path.read_text()
    with pytest.raises(ConfigError, match="is for NVIDIA H100"):
        tuned(folder, {BEST: 5.0}, output=path)
    assert path.read_text() == before


def test_an_architecture_without_kernels_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ConfigError, match="transformers' own code, without the kernels"):
        tuned(tmp_path, {})


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--device", "cpu"], "--device: got 'cpu'; kernels are tuned on a GPU: cuda or cuda:N"),
        (["--device", "cuda-1"], "--device: got 'cuda-1'; kernels are tuned on a GPU: cuda or cuda:N"),
        (["--rounds", "0"], "--rounds: got 0; must be 1 or more"),
    ],
)
def test_mistakes_are_said_in_one_line(folder, words, reason, capsys):
    assert main(["tune-kernels", str(folder), *words]) == 2
    assert capsys.readouterr().err == f"error: {reason}\n"


def test_without_a_gpu_it_says_what_is_missing(folder, monkeypatch, capsys):
    monkeypatch.setattr("forerun.ops.cuda.system.InstalledCuda", lambda: FakeCuda(torch_cuda=None, gpus=[]))
    assert main(["tune-kernels", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "is built without CUDA; install its CUDA build" in said
    assert "device='cpu'" not in said
    assert said.endswith("; the CPU's kernels need no tuning\n")
