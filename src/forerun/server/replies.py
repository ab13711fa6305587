"""What successful answers look like, for whoever reads /openapi.json; fields may be added to each."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from forerun.server.protocol import ErrorAnswer

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}


def reply(model: type[BaseModel], *, may_stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: JSON like the model, and events where a request asks for them."""
    stream = {"content": {"text/event-stream": {"schema": {"type": "string"}}}} if may_stream else {}
    return {200: {"model": model, **stream}}


class Version(BaseModel):
    """GET /version."""

    version: str


class ModelCard(BaseModel):
    """GET /v1/models/NAME."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    forerun: dict[str, Any]


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Usage(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(BaseModel):
    """One of an answer's completions."""

    index: int
    finish_reason: str
    stop_reason: int | str | None
    logprobs: dict[str, Any] | None


class TextChoice(Choice):
    """One that continues a prompt."""

    text: str


class FunctionCall(BaseModel):
    """A function, and what it is called with: the text of a JSON object."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of one of the request's tools."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(BaseModel):
    """What the model says in a conversation; `tool_calls` is left out where there are none."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCall] = []


class MessageChoice(Choice):
    """One that answers a conversation."""

    message: AssistantMessage


class Completion(BaseModel):
    """POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ChatCompletion(BaseModel):
    """POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[MessageChoice]
    usage: Usage


class Tokens(BaseModel):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    """POST /detokenize."""

    prompt: str
