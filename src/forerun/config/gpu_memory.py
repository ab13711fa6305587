"""What a GPU's memory holds: the share that an engine may use, what is in it already, and what is left for KV."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from forerun.config.settings import EngineSettings
from forerun.errors import MemoryBudgetError, StepError
from forerun.ops.cuda.failures import device_failure

logger = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """The memory of one GPU, in bytes; a fake stands in for it in tests."""

    def free_and_total(self) -> tuple[int, int]:
        """What nobody uses, and all of it."""
        ...

    def allocated(self) -> int:
        """What this process's tensors take now."""
        ...

    def reserved(self) -> int:
        """What torch has from the driver, for tensors that there are and for later ones."""
        ...

    def peak(self) -> int:
        """The most that tensors took at once since `reset_peak`."""
        ...

    def reset_peak(self) -> None:
        """Begin to look for the peak again."""
        ...

    def release_unused(self) -> None:
        """Give back to the driver what no tensor uses."""
        ...


class TorchMemory:
    """The memory of a GPU as torch's allocator knows it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        """See `DeviceMemory`."""
        return torch.cuda.mem_get_info(self._device)

    def allocated(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.memory_allocated(self._device)

    def reserved(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """See `DeviceMemory`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release_unused(self) -> None:
        """See `DeviceMemory`."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def memory_of(device: torch.device) -> DeviceMemory | None:
    """The memory of a GPU; None for a CPU, where KV takes no share of anything."""
    return TorchMemory(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """What becomes of an engine's share of a GPU, in bytes.

    Attributes:
        total: of the GPU.
        utilization: the part of it that the engine may use, `gpu_memory_utilization`.
        weights: the model's tensors, the drafter's too, and whatever else the process had made before the step.
        largest_step: the most that the largest step takes for a while.
        graphs: set aside for CUDA graphs.
        libraries: what the driver and libraries took since the model was to be loaded.
    """

    total: int
    utilization: float
    weights: int
    largest_step: int
    graphs: int
    libraries: int

    @property
    def share(self) -> int:
        """What the engine may use."""
        return int(self.total * self.utilization)

    @property
    def for_kv(self) -> int:
        """What is left for KV; below zero where that much is missing."""
        return self.share - self.weights - self.largest_step - self.graphs - self.libraries

    def __str__(self) -> str:
        return (
            f"{self.utilization:g} (gpu_memory_utilization) of {_gib(self.total)} are {_gib(self.share)}: "
            f"weights {_gib(self.weights)}, largest step {_gib(self.largest_step)}, CUDA graphs {_gib(self.graphs)}, "
            f"libraries {_gib(self.libraries)}, left for KV {_gib(max(0, self.for_kv))}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Steps that are executed to see what they take; they keep nothing.

    `largest` is the largest that there may be, `recorded` the largest that is recorded as a CUDA graph; None: none is.
    """

    largest: Callable[[], object]
    recorded: Callable[[], object] | None


def used_bytes(memory: DeviceMemory) -> int:
    """What is used of a GPU beside this process's tensors: by its driver, and by other processes."""
    free, total = memory.free_and_total()
    return total - free - memory.reserved()


def check_share(settings: EngineSettings, memory: DeviceMemory) -> None:
    """Look whether the engine's share is free before anything is loaded.

    Raises:
        MemoryBudgetError: something else uses too much.
    """
    if settings.kv_cache_memory_bytes is not None or settings.num_gpu_blocks_override is not None:
        return  # KV is as large as was asked for, and takes no share
    memory.release_unused()  # of an engine, perhaps, that this process had before
    free, total = memory.free_and_total()
    share = int(total * settings.gpu_memory_utilization)
    if free < share:
        raise MemoryBudgetError(
            f"gpu_memory_utilization: got {settings.gpu_memory_utilization:g}, which is {_gib(share)} of {_gib(total)}, but "
            f"{_gib(free)} are free, {_gib(share - free)} too little; end what else uses the GPU (nvidia-smi names it), "
            f"or set it to {int(100 * free / total) / 100:g}"
        )


def check_weights(needed: int, settings: EngineSettings, memory: DeviceMemory) -> None:
    """Look whether weights will fit before they are loaded.

    Args:
        needed: their bytes on this GPU.
        settings: the engine's.
        memory: of this GPU.

    Raises:
        MemoryBudgetError: they are larger than what is free.
    """
    free, _ = memory.free_and_total()
    if needed > free:
        raise MemoryBudgetError(
            f"GPU memory: the weights take {_gib(needed)}, got {_gib(free)}; {_gib(needed - free)} are missing: "
            f"{_smaller_weights(settings)}"
        )


@contextmanager
def loading(settings: EngineSettings, memory: DeviceMemory | None) -> Iterator[None]:
    """Say what to lower where weights do not fit after all; without a GPU's memory nothing is looked at.

    Raises:
        MemoryBudgetError: they do not fit.
    """
    if memory is None:
        yield
        return
    free, _ = memory.free_and_total()
    try:
        yield
    except RuntimeError as error:
        if not isinstance(device_failure(error), StepError):
            raise
        raise MemoryBudgetError(
            f"GPU memory: the weights take more than the {_gib(free)} that were free; {_smaller_weights(settings)}"
        ) from error


def measure_share(
    settings: EngineSettings,
    memory: DeviceMemory,
    *,
    used_before: int,
    launch_bytes: int,
    make_steps: Callable[[], MeasuredSteps],
) -> MemoryShare:
    """Measure what the largest steps take beside the weights, which are loaded, and share out the rest.

    Graphs have memory of their own, in which all of them work: as much as the largest of them takes when it is not recorded.

    Args:
        settings: the engine's.
        memory: of the GPU.
        used_before: `used_bytes` before the model was loaded.
        launch_bytes: set aside for the launches of CUDA graphs.
        make_steps: makes the steps, with what KV they need, which is not counted.

    Raises:
        MemoryBudgetError: the largest step does not fit, or something else has taken what would be left for KV.
    """
    memory.release_unused()
    weights = memory.allocated()
    try:
        steps = make_steps()
        largest = _peak_of(steps.largest, memory)
        graphs = 0 if steps.recorded is None else launch_bytes + _peak_of(steps.recorded, memory)
    except StepError as error:
        free, _ = memory.free_and_total()
        raise MemoryBudgetError(
            f"GPU memory: beside the weights ({_gib(weights)}) the largest step does not fit, with {_gib(free)} free; lower "
            f"max_num_batched_tokens ({settings.max_num_batched_tokens}), max_num_seqs ({settings.max_num_seqs}) or max_model_len"
        ) from error
    del steps
    memory.release_unused()
    free, total = memory.free_and_total()
    share = MemoryShare(
        total=total,
        utilization=settings.gpu_memory_utilization,
        weights=weights,
        largest_step=largest,
        graphs=graphs,
        libraries=max(0, used_bytes(memory) - used_before),
    )
    logger.info("GPU memory: %s", share)
    needed = share.for_kv + share.largest_step + share.graphs
    if share.for_kv > 0 and free < needed:
        raise MemoryBudgetError(
            f"GPU memory: {_gib(needed)} are set aside for KV, the largest step and graphs, but {_gib(free)} are free, as something "
            "else has taken memory meanwhile; end it or lower gpu_memory_utilization"
        )
    return share


def _peak_of(run: Callable[[], object], memory: DeviceMemory) -> int:
    """The most that a step takes for a while."""
    before = memory.allocated()
    memory.reset_peak()
    run()
    return memory.peak() - before


def _smaller_weights(settings: EngineSettings) -> str:
    """What to change where weights do not fit."""
    return (
        "end what else uses the GPU, take a smaller model, set dtype='bfloat16' if it is wider, "
        f"set tensor_parallel_size above {settings.tensor_parallel_size}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
