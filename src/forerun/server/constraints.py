"""What a request's answer must match, and what a request may not ask for.

A field that nobody knows is ignored with one warning. A field that would constrain the answer in a way
that is not served is refused, for whoever sends it relies on it.
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

STRUCTURING = ("response_format", "structured_outputs")
"""Fields that say what the answer must match and that are served."""

UNSERVED = {
    "chat_template": "templates come with the model, not with requests; lay the prompt out and use /v1/completions",
    "documents": "put them into a message",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "modalities": "only text is served",
    "audio": "only text is served",
    "prompt_embeds": "send text or token ids",
    "tool_choice": "tools are for /v1/chat/completions",
    "tools": "tools are for /v1/chat/completions",
    "truncate_prompt_tokens": "shorten the prompt",
    "use_beam_search": "use n for several answers",
    "vllm_xargs": "leave it out",
}
"""Fields that would change the answer -> what to do instead."""

MEANINGLESS: tuple[Any, ...] = (None, False, [], {}, "none")
"""Values that ask for nothing."""

SERVED = {"modalities": ["text"]}
"""Fields of `UNSERVED` -> the value that asks for what is given anyway."""

MOST_WARNINGS = 100

_warned: set[str] = set()


def refuse_unserved(body: Body) -> None:
    """Refuse what would change the answer, and warn once of each other field that is ignored.

    Raises:
        ApiError: 400, a field constrains the answer.
    """
    for name, value in (body.model_extra or {}).items():
        if value in MEANINGLESS or name in STRUCTURING or (name in SERVED and value == SERVED[name]):
            continue
        if name in UNSERVED:
            raise ApiError(400, f"{name}: is not served; leave it out ({UNSERVED[name]})", param=name)
        if name.startswith(CONSTRAINING):
            raise ApiError(
                400,
                f"{name:.80}: answers cannot be constrained so; write response_format or structured_outputs",
                param=name[:80],
            )
        _warn_once(name)


def wanted_structure(body: Body) -> Mapping[str, Any] | None:
    """What `SamplingParams.structured_outputs` takes, from OpenAI's `response_format` or vLLM's `structured_outputs`.

    Raises:
        ApiError: 400, both are given, or one is not what it may be.
    """
    extra = body.model_extra or {}
    given = {name: extra[name] for name in STRUCTURING if extra.get(name) is not None}
    if len(given) > 1:
        raise ApiError(
            400, "response_format: is given with structured_outputs; leave one of them out", param="response_format"
        )
    if "structured_outputs" in given:
        wanted = given["structured_outputs"]
        if not isinstance(wanted, Mapping):
            raise ApiError(
                400, f"structured_outputs: got {wanted!r:.80}; must be an object", param="structured_outputs"
            )
        return wanted
    return _of_format(given["response_format"]) if given else None


def _of_format(wanted: Any) -> Mapping[str, Any] | None:
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if isinstance(wanted, Mapping) and kind == "text":
        return None
    if isinstance(wanted, Mapping) and kind == "json_object":
        return {"json_object": True}
    if isinstance(wanted, Mapping) and kind == "json_schema":
        named = wanted.get("json_schema")
        if isinstance(named, Mapping) and isinstance(named.get("schema"), Mapping):
            return {"json": named["schema"]}
        raise ApiError(
            400,
            "response_format: type 'json_schema' needs json_schema.schema, an object; give the schema there",
            param="response_format",
        )
    if isinstance(wanted, Mapping) and kind in ("regex", "choice") and wanted.get(kind) is not None:
        return {kind: wanted[kind]}
    if isinstance(wanted, Mapping) and kind == "structural_tag":
        return {"structural_tag": wanted}
    raise ApiError(
        400,
        f"response_format: got type {kind!r:.80}; may be 'text', 'json_object', 'json_schema', 'structural_tag', 'regex' or "
        "'choice', the last two with a field of that name",
        param="response_format",
    )


def _warn_once(name: str) -> None:
    if name in _warned or len(_warned) >= MOST_WARNINGS:
        return
    _warned.add(name)
    logger.warning("requests carry the field %.80r, which is not known here; it is ignored", name)
