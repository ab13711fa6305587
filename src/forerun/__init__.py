"""forerun: speculative decoding that writes exactly the target model's text, several times sooner."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.core.draft import NO_DRAFT as NO_DRAFT
    from forerun.core.draft import Draft as Draft
    from forerun.core.outputs import CompletionOutput as CompletionOutput
    from forerun.core.outputs import RequestOutput as RequestOutput
    from forerun.core.sampling_params import SamplingParams as SamplingParams
    from forerun.core.structured_outputs import StructuredOutputs as StructuredOutputs
    from forerun.errors import ForerunError as ForerunError
    from forerun.llm import LLM as LLM

__version__ = "0.1.0"

logging.getLogger("forerun").addHandler(logging.NullHandler())

# Loaded at first use, so that `import forerun` and `forerun --help` do not wait for torch.
_HOMES = {
    "LLM": "forerun.llm",
    "SamplingParams": "forerun.core.sampling_params",
    "StructuredOutputs": "forerun.core.structured_outputs",
    "RequestOutput": "forerun.core.outputs",
    "CompletionOutput": "forerun.core.outputs",
    "Draft": "forerun.core.draft",
    "NO_DRAFT": "forerun.core.draft",
    "ForerunError": "forerun.errors",
}

__all__ = [
    "LLM",
    "NO_DRAFT",
    "CompletionOutput",
    "Draft",
    "ForerunError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    return vars(importlib.import_module(_HOMES[name]))[name]
