"""Starts an engine's worker, without speculation where that is not to be had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.experiment.engines import ROSTER, environment_of, find_python
from benchmarks.experiment.placement import Placement
from benchmarks.experiment.settings import Settings
from benchmarks.peers.channel import WorkerError, WorkerProcess
from forerun.errors import ForerunError, ModelError
from forerun.models.store import resolve_model

SPECULATIVE, PLAIN = "speculative", "target_ar"
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Run:
    """One engine and the method asked of it."""

    engine: str
    method: str

    @property
    def key(self) -> str:
        """Its name in results and their files; transformers' is the bare method, as in the original."""
        return self.method if self.engine == "transformers" else f"{self.method}_{self.engine}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """All that starting takes: the target's folder, where models go, the caller's variables, a log's path."""

    run: Run
    settings: Settings
    placement: Placement
    model: Path
    caller: Mapping[str, str]
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A worker that has answered once. `fallback_reason` says why it does not speculate though it was asked to."""

    worker: WorkerProcess
    effective_method: str
    fallback_reason: str | None
    speculation: dict[str, Any] | None
    version: str
    load_seconds: float
    cpu_seconds: float


def start(launch: Launch, warm_up: list[list[int]], *, fall_back: Callable[[str], None]) -> Started:
    """Load the engine and let it answer `warm_up`; `fall_back` is told why it goes on without speculation.

    Raises:
        ForerunError: the engine is not installed, or fails without speculation too.
    """
    reason = None
    if launch.run.method == SPECULATIVE:
        try:
            _check_switches(launch)
            speculation = ROSTER[launch.run.engine].speculation(launch.settings, _drafter(launch.settings))
            return _start(launch, warm_up, speculation, None)
        except (WorkerError, ModelError, SwitchedOffError) as error:
            reason = str(error)
            fall_back(reason)
    return _start(launch, warm_up, None, reason)


class SwitchedOffError(ForerunError):
    """Speculation is asked for by one variable and ruled out by another."""


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
        settings = ROSTER[engine].settings(launch.settings, launch.placement)
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
