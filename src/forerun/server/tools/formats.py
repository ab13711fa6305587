"""The forms of tool calls by vLLM's names, and which of them a model writes."""

from __future__ import annotations

from forerun.server.tools.base import ToolFormat
from forerun.server.tools.hermes import Hermes
from forerun.server.tools.llama3_json import Llama3Json
from forerun.server.tools.mistral import Mistral

FORMATS: dict[str, ToolFormat] = {"hermes": Hermes(), "llama3_json": Llama3Json(), "mistral": Mistral()}

DEFAULT = "hermes"
"""For templates that say nothing of tools: what most small models have seen, if any."""

SIGNS = (
    ("<function=", None),  # Qwen3-Coder's
    ("<arg_key>", None),  # GLM's, within <tool_call>
    ("[ARGS]", None),  # Mistral's newer one
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": ', "llama3_json"),
)
"""What stands in a chat template -> the form it teaches (None: one that is not known here); the first counts."""


def format_of(tool_template: str | None) -> str | None:
    """Name of the form that a model writes; None if its template teaches one that is not known.

    Args:
        tool_template: the template that reads tools, if there is one.
    """
    if tool_template is None:
        return DEFAULT
    return next((name for sign, name in SIGNS if sign in tool_template), None)
