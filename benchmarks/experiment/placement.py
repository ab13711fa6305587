"""Chooses the GPUs of target and drafter, by GPU_STRATEGY."""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.errors import ConfigError

STRATEGIES = ("auto", "same", "separate", "shared_all", "multi_gpu_ratio")
DEVICE = re.compile(r"cuda:(\d+)")


@dataclass(frozen=True, slots=True)
class Placement:
    """Indices of the visible GPUs of each model, empty for the CPU. `is_auto` leaves the choice to the engine."""

    target: tuple[int, ...]
    drafter: tuple[int, ...]
    is_auto: bool = False


def place(
    strategy: str,
    num_gpus: int,
    *,
    target_gpu: str | None = None,
    drafter_gpu: str | None = None,
    target_ratio: int | None = None,
    drafter_ratio: int | None = None,
) -> Placement:
    """Place target and drafter.

    Args:
        strategy: one of STRATEGIES.
        num_gpus: the number of visible GPUs.
        target_gpu: overrides the strategy for the target: "auto", "cpu", or "cuda:N" with commas between several.
        drafter_gpu: overrides the strategy for the drafter.
        target_ratio: GPUs of the target under multi_gpu_ratio, or None for all but the drafter's.
        drafter_ratio: GPUs of the drafter, or None for all but the target's, or one if that is None too.

    Raises:
        ConfigError: there are too few GPUs, or a device has no such name.
    """
    if num_gpus == 0:
        for name, given in (("TARGET_GPU", target_gpu), ("DRAFTER_GPU", drafter_gpu)):
            if given not in (None, "auto", "cpu"):
                raise ConfigError(f"{name}: got {given!r}, but no GPU is visible; may be auto or cpu; leave it out")
        if strategy not in ("auto", "same", "shared_all"):
            raise ConfigError(
                f"GPU_STRATEGY: got {strategy!r}, but no GPU is visible; may be auto, same or shared_all; leave it out"
            )
        return Placement((), (), is_auto=True)
    placement = _by_strategy(strategy, num_gpus, target_ratio, drafter_ratio)
    return Placement(
        placement.target if target_gpu is None else _devices("TARGET_GPU", target_gpu, num_gpus),
        placement.drafter if drafter_gpu is None else _devices("DRAFTER_GPU", drafter_gpu, num_gpus),
        is_auto=placement.is_auto and target_gpu in (None, "auto") and drafter_gpu in (None, "auto"),
    )


def _by_strategy(strategy: str, num_gpus: int, target_ratio: int | None, drafter_ratio: int | None) -> Placement:
    everything = tuple(range(num_gpus))
    if strategy in ("auto", "shared_all"):
        return Placement(everything, everything, is_auto=strategy == "auto")
    if strategy == "same":
        return Placement((0,), (0,))
    if strategy == "separate":
        target_ratio = drafter_ratio = 1
    elif target_ratio is None and drafter_ratio is None:
        target_ratio, drafter_ratio = num_gpus - 1, 1
    target_ratio = num_gpus - (drafter_ratio or 0) if target_ratio is None else target_ratio
    drafter_ratio = num_gpus - target_ratio if drafter_ratio is None else drafter_ratio
    if min(target_ratio, drafter_ratio) < 1 or target_ratio + drafter_ratio > num_gpus:
        raise ConfigError(
            f"GPU_STRATEGY: got {strategy!r} with {target_ratio} GPUs for the target and {drafter_ratio} for the drafter; "
            f"{num_gpus} are visible; use auto or same, or change TARGET_GPU_RATIO and DRAFTER_GPU_RATIO"
        )
    return Placement(everything[:target_ratio], everything[target_ratio : target_ratio + drafter_ratio])


def _devices(name: str, text: str, num_gpus: int) -> tuple[int, ...]:
    if text == "auto":
        return tuple(range(num_gpus))
    if text == "cpu":
        return ()
    devices = []
    for part in text.split(","):
        match = DEVICE.fullmatch(part.strip())
        if match is None or int(match[1]) >= num_gpus:
            raise ConfigError(
                f"{name}: got {text!r}; may be auto, cpu, or cuda:0 to cuda:{num_gpus - 1} with commas between them; mend it"
            )
        devices.append(int(match[1]))
    return tuple(devices)
