"""The bodies and answers of /v1/responses: OpenAI's fields, and those of a chat that say how an answer is written.

As in `protocol`, types are strict, null means left out, and lists end at the first mistake. What names the user, charges,
or finds OpenAI's prompt cache (`safety_identifier`, `service_tier`, `prompt_cache_key`) is taken and means nothing: the
prefix cache needs no names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from forerun.models.chat.conversation import called_arguments
from forerun.server.protocol import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Body,
    FunctionName,
    Parameters,
    SamplingBody,
    TopLogprobs,
)

MOST_ITEMS = MOST_MESSAGES - 1  # the instructions are a message, too
MOST_METADATA = 16  # OpenAI's limits
MOST_KEY_CHARACTERS = 64
MOST_VALUE_CHARACTERS = 512

Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""What an answer is to hold besides; all but the first is of what no answer has here."""


# --- conversations ---------------------------------------------------------------------------------


class TextPart(BaseModel):
    """A piece of a text, the user's or the model's; what is beside it is not looked at."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalPart(BaseModel):
    """What the model said instead of an answer."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


PARTS = ("input_text", "output_text", "text", "refusal")


def _only_text(content: Any) -> Any:
    """Refuse parts that are no text in a sentence that names them."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is not None and kind not in PARTS:
            raise ValueError(
                f"got a part of type {kind!r:.40}; this model reads text only; send parts of type 'input_text'"
            )
    return content


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Content = Annotated[str | Annotated[list[Part], Field(fail_fast=True)], BeforeValidator(_only_text)]


class MessageItem(BaseModel):
    """A message, of the user or of an earlier answer."""

    model_config = ConfigDict(strict=True)

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(BaseModel):
    """A call of an earlier answer; the arguments come as JSON text."""

    model_config = ConfigDict(strict=True)

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Annotated[dict[str, Any], BeforeValidator(called_arguments)]


class CallOutputItem(BaseModel):
    """What a call gave."""

    model_config = ConfigDict(strict=True)

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class Thought(BaseModel):
    """A piece of what the model thought, or of its summary."""

    text: str


Thoughts = Annotated[list[Thought], Field(fail_fast=True)]


class ReasoningItem(BaseModel):
    """What the model thought before an earlier answer; only OpenAI's service can read what is encrypted."""

    type: Literal["reasoning"]
    summary: Thoughts | None = None
    content: Thoughts | None = None


ITEMS = ("message", "function_call", "function_call_output", "reasoning")
INSTEAD = {"item_reference": "nothing is kept here; send the item itself"}


def _items(given: Any) -> Any:
    """The items of the input: a text is one message, and an item without type is one; others are refused by name."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list):
        return given
    items = [{"type": "message"} | item if isinstance(item, dict) else item for item in given]
    for place, item in enumerate(items):
        kind = item["type"] if isinstance(item, dict) else ITEMS[0]
        if kind not in ITEMS:
            instead = INSTEAD.get(kind, "leave it out") if isinstance(kind, str) else "leave it out"
            raise ValueError(
                f"got an item of type {kind!r:.40} at {place}; may have {', '.join(map(repr, ITEMS))}; {instead}"
            )
    return items


Item = Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")]
Items = Annotated[list[Item], Field(min_length=1, max_length=MOST_ITEMS, fail_fast=True)]
Input = Annotated[Items, BeforeValidator(_items, json_schema_input_type=str | Items)]


# --- tools -----------------------------------------------------------------------------------------


class FunctionTool(BaseModel):
    """A function that the client runs."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


def _only_functions(tools: Any) -> Any:
    """Refuse tools that are no functions in a sentence that names them."""
    for place, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
        if kind not in ("function", "namespace"):
            raise ValueError(
                f"got one of type {kind!r:.40} at {place}; may be 'function' or 'namespace'; leave it out, as only the client runs tools, "
                'and their arguments are JSON (Codex leaves out web_search with web_search = "disabled" in its config.toml)'
            )
    return tools


class NamespaceTool(BaseModel):
    """Functions under a common name."""

    model_config = ConfigDict(strict=True)

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True), BeforeValidator(_only_functions)]


Tool = Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]
Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True), BeforeValidator(_only_functions)]


class NamedFunction(BaseModel):
    """The one function that is to be called."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    name: str
    namespace: str | None = None


class AllowedTools(BaseModel):
    """The functions that may be called; the model sees all of them."""

    model_config = ConfigDict(strict=True)

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)]


ToolChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedTools


# --- how the answer is to be -----------------------------------------------------------------------


class PlainFormat(BaseModel):
    """Text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(BaseModel):
    """JSON that matches a schema."""

    model_config = ConfigDict(strict=True)

    type: Literal["json_schema"]
    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextConfig(BaseModel):
    """What the answer's text must match; how wordy it is depends on the model alone."""

    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(BaseModel):
    """How much is thought; summaries are not made."""

    effort: str | None = None
    summary: str | None = None


class ResponsesStreamOptions(BaseModel):
    """What a stream carries besides: nothing here, also nothing that hides how long its pieces are."""

    include_obfuscation: Literal[False] | None = False


def _few_entries(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MOST_METADATA:
        raise ValueError(f"got {len(given)} entries; may have {MOST_METADATA}; leave some out")
    return given


MetadataKey = Annotated[str, Field(max_length=MOST_KEY_CHARACTERS)]
MetadataValue = Annotated[str, Field(max_length=MOST_VALUE_CHARACTERS)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MOST_METADATA), BeforeValidator(_few_entries)]


class PromptBody(Body):
    """POST /v1/responses/input_tokens, and what of /v1/responses makes the prompt."""

    input: Input
    instructions: str | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesBody(PromptBody, SamplingBody):
    """POST /v1/responses."""

    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    include: Annotated[list[Include], Field(max_length=64, fail_fast=True)] | None = None
    top_logprobs: TopLogprobs | None = None
    stream_options: ResponsesStreamOptions | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    client_metadata: dict[str, Any] | None = None


# --- answers ---------------------------------------------------------------------------------------


class WrittenText(BaseModel):
    """Text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]]


class WrittenMessage(BaseModel):
    """A stretch of text."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[WrittenText]


class WrittenThoughts(BaseModel):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class WrittenReasoning(BaseModel):
    """What was thought before the answer; summaries are not made."""

    type: Literal["reasoning"]
    id: str
    summary: list[Thought]
    content: list[WrittenThoughts]
    status: Literal["completed", "incomplete"]


class WrittenCall(BaseModel):
    """A call of one of the request's functions."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["completed", "incomplete"]


class InputTokensDetails(BaseModel):
    """Of the tokens read, what was in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """Of the tokens written, what was thought, and what became of those drafted from the request's prediction."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class ResponsesUsage(BaseModel):
    """Tokens read and written."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    """Why an answer is not whole."""

    reason: Literal["max_output_tokens"]


class WrittenResponse(BaseModel):
    """POST /v1/responses; what is not here repeats the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[WrittenReasoning | WrittenMessage | WrittenCall]
    store: Literal[False]
    usage: ResponsesUsage


class InputTokens(BaseModel):
    """POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int
