"""What a request may not ask for: constraints and changes of the answer that this server does not make.

A field that nobody knows is ignored with one warning. A field that would constrain the answer is
refused, for whoever sends it relies on it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from forerun.server.errors import ApiError
from forerun.server.protocol import Body

logger = logging.getLogger(__name__)

CONSTRAINING = ("guided", "grammar", "structural", "json_schema", "regex", "ebnf", "logits_processor")
"""Fields whose names begin so say what the answer must look like."""

UNSERVED = {
    "chat_template": "templates come with the model, not with requests; lay the prompt out and use /v1/completions",
    "documents": "put them into a message",
    "function_call": "tools are not served",
    "functions": "tools are not served",
    "modalities": "only text is served",
    "audio": "only text is served",
    "prompt_embeds": "send text or token ids",
    "structured_outputs": "answers cannot be constrained; ask for the form in the prompt",
    "tool_choice": "tools are not served",
    "tools": "tools are not served",
    "truncate_prompt_tokens": "shorten the prompt",
    "use_beam_search": "use n for several answers",
    "vllm_xargs": "leave it out",
}
"""Fields that would change the answer -> what to do instead."""

MEANINGLESS: tuple[Any, ...] = (None, False, [], {}, "none")
"""Values that ask for nothing."""

MOST_WARNINGS = 100

_warned: set[str] = set()


def refuse_unserved(body: Body) -> None:
    """Refuse what would change the answer, and warn once of each other field that is ignored.

    Raises:
        ApiError: 400, a field constrains the answer.
    """
    for name, value in (body.model_extra or {}).items():
        if value in MEANINGLESS:
            continue
        if name == "response_format":
            _refuse_format(value)
        elif name in UNSERVED:
            raise ApiError(400, f"{name}: is not served; leave it out ({UNSERVED[name]})", param=name)
        elif name.startswith(CONSTRAINING):
            raise ApiError(400, f"{name:.80}: answers cannot be constrained so; leave it out", param=name[:80])
        else:
            _warn_once(name)


def _refuse_format(wanted: Any) -> None:
    """The place where `response_format` is to become sampling parameters."""
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if kind != "text":
        raise ApiError(
            400,
            f"response_format: got type {kind!r:.80}; may be 'text'; ask for the form in the prompt",
            param="response_format",
        )


def _warn_once(name: str) -> None:
    if name in _warned or len(_warned) >= MOST_WARNINGS:
        return
    _warned.add(name)
    logger.warning("requests carry the field %.80r, which is not known here; it is ignored", name)
