"""What `prove` sets up."""

from __future__ import annotations

import gc

import pytest

from forerun.proof.run import KV_BYTES, PROMPTS, prove, with_room_for_two
from tests.gpus import FakeCuda
from tests.stand_in import save_stand_in


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr("forerun.config.settings.InstalledCuda", FakeCuda)


def test_on_a_gpu_two_engines_share_the_memory(gpu):
    assert with_room_for_two("m", {"dtype": "float32"}) == {"dtype": "float32", "kv_cache_memory_bytes": KV_BYTES}


@pytest.mark.parametrize(
    "settings", [{"device": "cpu"}, {"kv_cache_memory_bytes": 1 << 20}, {"num_gpu_blocks_override": 100}]
)
def test_what_the_settings_say_stays(gpu, settings):
    assert with_room_for_two("m", settings) == settings


def test_on_a_cpu_each_engine_has_what_it_has_by_itself(monkeypatch):
    monkeypatch.setattr("forerun.config.settings.InstalledCuda", lambda: FakeCuda(gpus=[], driver_cuda=None))
    assert with_room_for_two("m", {}) == {}


def test_users_pools_are_neither_read_nor_written(tmp_path):
    model, folder = save_stand_in(tmp_path / "model"), tmp_path / "pools"
    settings = {"pools_folder": folder, "max_model_len": 256, "device": "cpu"}
    prove(
        str(model),
        speculative_config={"method": "suffix", "num_speculative_tokens": 3},
        settings=settings,
        prompts=PROMPTS[:1],
        max_tokens=2,
        num_samples=1,
    )
    gc.collect()  # nobody uses the engines any more: pools would be saved
    assert not folder.exists()
