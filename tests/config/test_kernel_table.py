"""Which table of tiles an engine takes."""

from __future__ import annotations

import logging

import pytest

from forerun.config.kernel_table import describe_table, find_table, table_file, use_kernel_table
from forerun.config.settings import EngineSettings
from forerun.errors import ConfigError
from forerun.ops.cuda import tiles
from forerun.ops.cuda.tiles import Tiles, TileTable
from tests.gpus import A100, H200, FakeCuda

SYSTEM = FakeCuda(gpus=[H200, A100])
TABLE = TileTable(gpu=H200.name, capability=(9, 0), triton="3.7.1", tiles={(64, 64): Tiles(32, 64, 1)})


def test_the_cached_table_of_this_gpu_and_triton_is_taken(tmp_path):
    assert find_table(None, SYSTEM, 0, folder=tmp_path) is None
    path = table_file(tmp_path, H200, "3.7.1")
    TABLE.write(path)
    assert path == tmp_path / "kernel-tables" / "nvidia-h200-triton-3.7.1.json"
    assert find_table(None, SYSTEM, 0, folder=tmp_path) == (path, TABLE)
    assert find_table(None, SYSTEM, 1, folder=tmp_path) is None, "the other GPU has none"
    assert find_table(None, FakeCuda(triton="3.6.0"), 0, folder=tmp_path) is None


def test_a_cache_that_may_not_be_looked_into_has_no_table(tmp_path):
    """For root there is no such folder, but a name that is too long is refused alike."""
    assert find_table(None, SYSTEM, 0, folder=tmp_path / ("x" * 300)) is None


def test_a_named_table_comes_first_and_must_fit(tmp_path):
    named = tmp_path / "own.json"
    TABLE.write(named)
    assert find_table(named, SYSTEM, 0, folder=tmp_path) == (named, TABLE)
    with pytest.raises(ConfigError, match=r"own\.json: is for NVIDIA H200"):
        find_table(named, SYSTEM, 1, folder=tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        find_table(tmp_path / "none.json", SYSTEM, 0, folder=tmp_path)


def test_a_damaged_table_in_the_cache_is_no_reason_to_go_on_without(tmp_path):
    path = table_file(tmp_path, H200, "3.7.1")
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        find_table(None, SYSTEM, 0, folder=tmp_path)


def test_an_engine_says_which_table_it_uses(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tiles, "_in_use", None)
    monkeypatch.setattr(tiles, "_tiles", {})
    named = tmp_path / "own.json"
    TABLE.write(named)
    with caplog.at_level(logging.INFO, "forerun.config.kernel_table"):
        use_kernel_table(EngineSettings(model="m", kernel_table=named), SYSTEM, 0, folder=tmp_path)
    assert caplog.messages == [f"kernel table: {named} (1 shape, digest {TABLE.digest})"]
    assert tiles.tiles_of(64, 64) == Tiles(32, 64, 1)


def test_no_table_is_said_too():
    assert describe_table(None) == "none, the built-in rule"


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_table_for_an_engine_without_the_kernels_is_refused(device, monkeypatch):
    monkeypatch.setattr("forerun.config.settings.InstalledCuda", lambda: FakeCuda(gpus=[], driver_cuda=None))
    settings = EngineSettings(model="m", device=device, kernel_table="table.json")
    with pytest.raises(
        ConfigError, match=r"kernel_table: got 'table\.json', but device cpu computes without the kernels"
    ):
        _ = settings.torch_device
    with pytest.raises(ConfigError, match="must be a file"):
        EngineSettings(model="m", kernel_table=3)


@pytest.mark.parametrize("device_step", [None, True])
def test_a_table_may_be_named_wherever_the_kernels_may_compute(device_step, monkeypatch):
    monkeypatch.setattr("forerun.config.settings.InstalledCuda", FakeCuda)
    settings = EngineSettings(model="m", device="cuda", device_step=device_step, kernel_table="table.json")
    assert settings.torch_device.type == "cuda"


def test_a_named_table_is_not_ignored_where_triton_is_missing_or_torch_is_asked_for(monkeypatch):
    monkeypatch.setattr("forerun.config.settings.InstalledCuda", lambda: FakeCuda(triton=None))
    with pytest.raises(ConfigError, match="kernel_table: on a GPU it needs triton"):
        _ = EngineSettings(model="m", device="cuda", kernel_table="table.json").torch_device
    assert EngineSettings(model="m", device="cuda").torch_device.type == "cuda"
    with pytest.raises(ConfigError, match="computes without the kernels"):
        _ = EngineSettings(model="m", device="cuda", device_step=False, kernel_table="table.json").torch_device
