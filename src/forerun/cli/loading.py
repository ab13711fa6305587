"""Pulls and loads models, with progress bars and spinners on stderr."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

import forerun
from forerun.cli.options import EngineOptions
from forerun.cli.output import plain_console
from forerun.core.cache_folder import cache_folder
from forerun.deploy.disaggregated.options import PrefillOptions
from forerun.models import download, store

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.config.settings import EngineSettings
    from forerun.models.base import LoadedTarget

LABELS = {"download": "Downloading", "check": "Checking", "convert": "Converting"}


def load_llm(model: str, options: EngineOptions) -> LLM:
    """Load a model; a known model that is absent is pulled first."""
    pull_if_needed(model)
    with spinner(f"Loading {model}"), without_collections():
        return forerun.LLM(model, **options.settings())


def load_disaggregated(model: str, options: EngineOptions, prefill: PrefillOptions) -> LLM:
    """Load a model in two processes, of which one reads the prompts, as `load_llm` does otherwise."""
    assert prefill.prefill_threads is not None, "asked for"
    pull_if_needed(model)
    with spinner(f"Loading {model} in two processes"), without_collections():
        from forerun.deploy.disaggregated.llm import DisaggregatedLLM  # torch: only when it is needed

        return DisaggregatedLLM(
            model,
            prefill_threads=prefill.prefill_threads,
            max_local_prefill_length=prefill.max_local_prefill_length,
            **options.settings(),
        )


def load_target(settings: EngineSettings) -> LoadedTarget:
    """Load a model without an engine around it, as `load_llm` does otherwise."""
    pull_if_needed(settings.model)
    with spinner(f"Loading {settings.model}"), without_collections():
        from forerun.build import load_target as load  # torch: only when it is needed

        return load(store.resolve_model(settings.model), settings, settings.torch_device)


def pull_if_needed(model: str) -> None:
    """Pull a known model that is not ready; paths, hub ids and wrong names are left to `LLM`."""
    if model not in store.KNOWN_MODELS or Path(model).exists():
        return
    state = store.ModelStore().state(model)
    if state == "ready":
        return
    print(f"model {model} is {state} in {cache_folder()}: pulling it", file=sys.stderr)
    pull(model)


def pull(name: str) -> Path:
    """Pull a known model, or check the files that are there, with progress bars."""
    with pull_bars() as report:
        return store.pull(name, report=report)


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Show a spinner with `text` while the block runs, if stderr is a terminal."""
    console = plain_console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(Text(text)):  # of a text alone rich would read markup here, too
        yield


@contextmanager
def without_collections() -> Iterator[None]:
    """Import and load without Python's garbage collector, and leave what was made out of later collections.

    All of it stays to the end, half a million objects of torch among it, which the collector would walk again and again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def pull_bars() -> Iterator[download.Report]:
    """Show one bar per stage of a pull, if stderr is a terminal."""
    console = plain_console(stderr=True)
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(),
        TextColumn("{task.fields[size]:>13}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield _BarPerStage(bars)


class _BarPerStage:
    """Draws the progress of a pull: each stage has a bar, which stops when the next stage begins."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._current: TaskID | None = None

    def __call__(self, progress: download.Progress) -> None:
        if progress.stage not in LABELS:
            return
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = self._bars.add_task(LABELS[progress.stage], total=progress.total, size="")
        task = self._tasks[progress.stage]
        if self._current not in (None, task):
            self._bars.stop_task(self._current)
        self._current = task
        size = ""
        if progress.total:
            scale, unit = (1e6, "MB") if progress.total >= 1e5 else (1e3, "kB")
            size = f"{progress.done / scale:.1f}/{progress.total / scale:.1f} {unit}"
        self._bars.update(task, completed=progress.done, total=progress.total, size=size)
