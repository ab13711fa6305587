"""Starts an engine's worker, and falls back to plain decoding if speculation fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiment.engines import ENGINES, environment_of, find_python
from benchmarks.experiment.placement import Placement
from benchmarks.experiment.settings import Settings
from benchmarks.peers.worker_process import WorkerError, WorkerProcess
from forerun.errors import ForerunError, ModelError
from forerun.models.store import resolve_model

SPECULATIVE, PLAIN = "speculative", "target_ar"
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Run:
    """One engine and the requested method."""

    engine: str
    method: str

    @property
    def key(self) -> str:
        """The run's name in results and file names; that of transformers is the bare method, as in the original."""
        return self.method if self.engine == "transformers" else f"{self.method}_{self.engine}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All that starting a worker needs: run, settings, GPUs, target folder, environment variables, log file."""

    run: Run
    settings: Settings
    placement: Placement
    model: Path
    caller: Mapping[str, str]
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A worker that is warm. `fallback_reason` says why it does not speculate although that was requested."""

    worker: WorkerProcess
    effective_method: str
    fallback_reason: str | None
    speculation: dict[str, Any] | None
    version: str
    load_seconds: float
    cpu_seconds: float


def start(launch: Launch, warm_up: list[list[int]], *, fall_back: Callable[[str], None]) -> Started:
    """Load the engine and let it answer `warm_up`; `fall_back` is called with the reason of a fallback.

    Raises:
        ForerunError: the engine is not installed, or fails without speculation too.
    """
    reason = None
    if launch.run.method == SPECULATIVE:
        try:
            _check_switches(launch)
            speculation = ENGINES[launch.run.engine].speculation(launch.settings, _drafter(launch.settings))
            return _start(launch, warm_up, speculation, None)
        except (WorkerError, ModelError, SwitchedOffError) as error:
            reason = str(error)
            fall_back(reason)
    return _start(launch, warm_up, None, reason)


class SwitchedOffError(ForerunError):
    """One variable requests speculation and another one rules it out."""


def _check_switches(launch: Launch) -> None:
    settings = launch.settings
    if not settings.enable_speculative:
        raise SwitchedOffError("INFERENCE_METHOD=speculative but ENABLE_SPECULATIVE=false")
    if launch.run.engine == "vllm" and not settings.vllm_enable_speculative:
        raise SwitchedOffError("INFERENCE_METHOD=speculative but VLLM_ENABLE_SPECULATIVE=false")


def _drafter(settings: Settings) -> Path | None:
    return None if settings.drafter_model is None else resolve_model(settings.drafter_model)


def _start(launch: Launch, warm_up: list[list[int]], speculation: dict[str, Any] | None, reason: str | None) -> Started:
    engine = launch.run.engine
    python = find_python(engine)
    worker = WorkerProcess(
        [str(python), "-m", f"benchmarks.experiment.workers.{engine}"],
        environment=environment_of(engine, python, launch.placement, launch.caller),
        log=launch.log.with_suffix(".log" if reason is None else ".fallback.log"),
    )
    try:
        settings = ENGINES[engine].settings(launch.settings, launch.placement)
        loaded = worker.ask("load", model=str(launch.model), settings=settings, speculation=speculation)
        answer = worker.ask("batch", prompts=warm_up, max_tokens=WARM_UP_TOKENS)
    except BaseException:
        worker.close()
        raise
    return Started(
        worker=worker,
        effective_method=SPECULATIVE if speculation else PLAIN,
        fallback_reason=reason,
        speculation=speculation,
        version=loaded["version"],
        load_seconds=loaded["seconds"],
        cpu_seconds=answer["cpu_seconds"],
    )
