"""What `prove` sets up."""

from __future__ import annotations

import pytest

from forerun.proof.run import KV_BYTES, with_room_for_two
from tests.gpus import FakeCuda


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
