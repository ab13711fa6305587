"""Engines with device_step whose model is computed as without it, so that each step's rows must be known to the host first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.models.decoder import Decoder
from tests.engines import tiny_llm, tiny_target


@dataclass(frozen=True)
class ForeignModel:
    """A model that forerun's own layers cannot compute, as transformers' are."""

    model: Decoder

    def __getattr__(self, name):
        return getattr(self.model, name)


def host_rows_llm(config=None, **settings):
    """An LLM over the tiny model as one that runs through other code."""
    target = replace(tiny_target(), model=ForeignModel(tiny_target().model))
    return tiny_llm(config, target=target, **({"device_step": True} | settings))
