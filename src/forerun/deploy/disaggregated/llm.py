"""`LLM` with a process beside it that reads the prompts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch

from forerun.config.settings import EngineSettings
from forerun.core.control_groups import cpu_quota
from forerun.deploy.disaggregated.engine import DisaggregatedEngine, TransferStats
from forerun.deploy.disaggregated.options import DEFAULT_LOCAL_PREFILL, PrefillOptions
from forerun.deploy.disaggregated.prefill import identity_of
from forerun.deploy.disaggregated.prefill_process import PrefillProcess
from forerun.drafters.base import BuildsWithHead
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.models.base import LoadedTarget
from forerun.ops.native.threads import lease_cores, usable_cores

OWN_SETTINGS = ("pools_folder",)  # of the process that answers alone


class DisaggregatedLLM(LLM):
    """A model in two processes of this machine: one reads prompts, this one answers, each on cores of its own.

    Texts are those of `LLM`, to the bit where the target's arithmetic does not depend on the batch (`is_batch_invariant`).

    Args:
        model: as for `LLM`.
        prefill_threads: threads of the process that reads; this one computes with the rest.
        max_local_prefill_length: prompts with at most so many tokens in blocks that are not cached here are read here.
        settings: as for `LLM`; both processes have them.

    Raises:
        ConfigError: there are too few cores, the model is on a GPU or in several processes, or a setting does not fit.
        ModelError: the model cannot be loaded.
        WorkerError: the other process cannot load it.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        prefill_threads: int = 1,
        max_local_prefill_length: int = DEFAULT_LOCAL_PREFILL,
        **settings: Any,
    ) -> None:
        PrefillOptions(prefill_threads=prefill_threads, max_local_prefill_length=max_local_prefill_length)
        _check(EngineSettings.from_keywords(str(model), settings))
        self._cores, other_cores = share_cores(prefill_threads)
        self._num_threads = torch.get_num_threads() - prefill_threads
        prefill = PrefillProcess(num_threads=prefill_threads, cores=other_cores)
        close = weakref.finalize(self, prefill.close)
        try:
            super().__init__(model, **settings)  # keeps the packed weights, which the other process then maps
            prefill.load(str(self.path), _as_json(settings))
            prefill.wait_until_ready(identity_of(self))
        except BaseException:
            close()
            raise
        self._disaggregated = DisaggregatedEngine(
            self._engine, prefill.client, max_local_prefill_length=max_local_prefill_length
        )
        self._client = self._disaggregated
        self._close = close

    def close(self) -> None:
        """End the other process; this one then reads the prompts that come. Dropping the object does so, too."""
        self._close()

    def _once_loaded(self, target: LoadedTarget) -> None:
        """Leave the rest of the cores to the other process; what steps cost is kept by the number of threads that are left."""
        if target.kernels is None:
            torch.set_num_threads(self._num_threads)
            return
        cores = self._cores if self._cores and lease_cores(self._cores) else []
        target.kernels.use_threads(self._num_threads, cores=cores)

    def check_replaces_head(self) -> BuildsWithHead:
        """Refuse: the process that reads prompts has the head, too.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("head: with prefill_threads it cannot be replaced; leave them out, or start again with it")

    @property
    def transfers(self) -> TransferStats:
        """What has come from the process that reads prompts."""
        return self._disaggregated.transfers


def share_cores(prefill_threads: int) -> tuple[list[int], list[int]]:
    """The cores of the process that answers, and those of the one that reads; none: they are not bound.

    Raises:
        ConfigError: one of the two would have no thread.
    """
    total = torch.get_num_threads()
    if prefill_threads >= total:
        raise ConfigError(
            f"prefill_threads: got {prefill_threads}; there are {total} cores to compute on, of which the engine that "
            + (f"answers needs one: may be 1 to {total - 1}" if total > 1 else "answers needs the one; leave it out")
        )
    cores, quota = usable_cores(), cpu_quota()
    if len(cores) != total or (quota is not None and quota < total):
        return [], []
    return cores[: total - prefill_threads], cores[total - prefill_threads :]


def _check(settings: EngineSettings) -> None:
    if settings.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size: got {settings.tensor_parallel_size}; must be 1 with prefill_threads, as the KV that is "
            "handed over lies in one process; leave one of them out"
        )
    if settings.torch_device.type != "cpu":
        raise ConfigError(f"prefill_threads: the model is on {settings.torch_device}; must be on the CPU; leave it out")


def _as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as they go to the other process."""
    plain = {name: value for name, value in settings.items() if name not in OWN_SETTINGS}
    if isinstance(dtype := plain.get("dtype"), torch.dtype):
        plain["dtype"] = str(dtype).removeprefix("torch.")
    return plain
