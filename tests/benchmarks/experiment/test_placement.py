"""GPU_STRATEGY places target and drafter on the visible GPUs."""

from __future__ import annotations

import pytest

from benchmarks.experiment.placement import Placement, place
from forerun.errors import ConfigError

ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("strategy", "target", "drafter"),
    [
        ("auto", ALL, ALL),
        ("shared_all", ALL, ALL),
        ("same", (0,), (0,)),
        ("separate", (0,), (1,)),
        ("multi_gpu_ratio", (0, 1, 2), (3,)),
    ],
)
def test_each_strategy(strategy, target, drafter):
    assert place(strategy, 4) == Placement(target, drafter, is_auto=strategy == "auto")


def test_ratios_count_gpus():
    assert place("multi_gpu_ratio", 8, target_ratio=6, drafter_ratio=2) == Placement((0, 1, 2, 3, 4, 5), (6, 7))
    assert place("multi_gpu_ratio", 8, target_ratio=5) == Placement((0, 1, 2, 3, 4), (5, 6, 7))
    assert place("multi_gpu_ratio", 8, drafter_ratio=3) == Placement((0, 1, 2, 3, 4), (5, 6, 7))


def test_named_devices_override_the_strategy():
    assert place("same", 4, target_gpu="cuda:2,cuda:3", drafter_gpu="cpu") == Placement((2, 3), ())


def test_without_gpus_everything_is_on_the_processor():
    assert place("auto", 0) == place("shared_all", 0, target_gpu="cpu") == Placement((), (), is_auto=True)


@pytest.mark.parametrize(
    ("strategy", "num_gpus", "options", "message"),
    [
        ("separate", 0, {}, "no GPU is visible"),
        ("separate", 1, {}, "1 are visible"),
        ("multi_gpu_ratio", 4, {"target_ratio": 6, "drafter_ratio": 2}, "6 GPUs for the target and 2"),
        ("auto", 0, {"target_gpu": "cuda:0"}, "TARGET_GPU: got 'cuda:0'"),
        ("auto", 2, {"drafter_gpu": "cuda:2"}, "DRAFTER_GPU: got 'cuda:2'.*cuda:0 to cuda:1"),
    ],
)
def test_too_few_gpus_are_refused(strategy, num_gpus, options, message):
    with pytest.raises(ConfigError, match=message):
        place(strategy, num_gpus, **options)
