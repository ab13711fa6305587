"""Loads models, and pulls those that are not there, with progress on stderr."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import forerun
from forerun.cli import torch_libraries
from forerun.cli.options import EngineOptions
from forerun.core.cache_folder import cache_folder
from forerun.deploy.disaggregated.options import PrefillOptions
from forerun.errors import ForerunError
from forerun.models import store
from forerun.models.tokenizer_files import read_ahead

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.config.settings import EngineSettings
    from forerun.models.base import LoadedTarget


def load_llm(model: str, options: EngineOptions) -> LLM:
    """Load a model; a known model that is absent is pulled first."""
    pull_if_needed(model)
    with _loading(model):
        return forerun.LLM(model, **options.settings())


def load_disaggregated(model: str, options: EngineOptions, prefill: PrefillOptions) -> LLM:
    """Load a model in two processes, of which one reads the prompts, as `load_llm` does otherwise."""
    assert prefill.prefill_threads is not None, "asked for"
    pull_if_needed(model)
    with _loading(model, how=" in two processes"):
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
    with _loading(settings.model):
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
    from forerun.cli.pulling import pull  # rich's bars: only when they are needed

    pull(model)


@contextmanager
def _loading(model: str, *, how: str = "") -> Iterator[None]:
    """Show that a model is being loaded, and begin with what there is time for while torch's libraries are being opened."""
    with _shown(f"Loading {model}{how}"), without_collections():
        torch_libraries.import_meanwhile()
        with suppress(ForerunError, OSError, RuntimeError):  # of a name that is none, which loading it will say
            if store.hub_id(model) is None:
                read_ahead(store.resolve_model(model))
        yield


def _shown(what: str) -> AbstractContextManager[None]:
    if not sys.stderr.isatty():
        return nullcontext()
    from forerun.cli.console import spinner  # rich: only for a terminal

    return spinner(what)


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
