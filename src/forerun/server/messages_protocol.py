"""The bodies and answers of /v1/messages: Anthropic's fields, and some of our own.

As in `protocol`, types are strict, null means left out, and lists end at the first mistake. What marks text for
Anthropic's cache, charges or keeps track of it (`cache_control`, `service_tier`, `metadata`) is taken and means nothing:
the prefix cache needs no marks.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from forerun.models.chat.conversation import not_too_deep
from forerun.server.protocol import (
    INT64,
    MOST_MESSAGES,
    MOST_STOPS,
    MOST_TOOLS,
    Body,
    Content,
    ForerunFields,
    FunctionName,
    Parameters,
    Prediction,
    Salt,
    Stop,
    TextPart,
)

BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Roles -> the blocks that their messages may have."""


# --- conversations ---------------------------------------------------------------------------------


class ThinkingBlock(BaseModel):
    """What the assistant thought in an earlier turn; its signature is not looked at."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(BaseModel):
    """Thoughts that only Anthropic's models can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(BaseModel):
    """A call of a tool."""

    model_config = ConfigDict(strict=True)

    type: Literal["tool_use"]
    id: str
    name: str
    input: Annotated[dict[str, Any], AfterValidator(not_too_deep)]


class ToolResultBlock(BaseModel):
    """What a call gave."""

    model_config = ConfigDict(strict=True)

    type: Literal["tool_result"]
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = False


Block = Annotated[
    TextPart | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Turn(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True)

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]

    @model_validator(mode="before")
    @classmethod
    def _only_blocks_of_the_role(cls, given: Any) -> Any:
        """Refuse other blocks in a sentence that names them."""
        role, content = (given.get("role"), given.get("content")) if isinstance(given, dict) else (None, None)
        served = BLOCKS.get(role, ()) if isinstance(role, str) else ()
        for block in content if served and isinstance(content, list) else ():
            kind = block.get("type") if isinstance(block, dict) else None
            if kind is not None and kind not in served:
                raise ValueError(
                    f"got a block of type {kind!r:.40}; this model reads text only, and role {role!r} may have blocks of type "
                    f"{', '.join(map(repr, served))}"
                )
        return given

    @property
    def blocks(self) -> list[Block]:
        """The content as blocks, one at least."""
        if isinstance(self.content, str):
            return [TextPart(type="text", text=self.content)]
        return self.content or [TextPart(type="text", text="")]


class Tool(BaseModel):
    """A tool that the client runs; hints to Anthropic's service, examples among them, are not looked at."""

    model_config = ConfigDict(strict=True)

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_tool_of_anthropics(cls, given: Any) -> Any:
        """Refuse tools that Anthropic's service runs or describes."""
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in (None, "custom"):
            raise ValueError(
                f"got type {kind!r:.40}, a tool of Anthropic's own; may be 'custom'; leave it out, or describe it by an input_schema"
            )
        return given


class ToolChoice(BaseModel):
    """Whether tools are called, and which."""

    model_config = ConfigDict(strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False

    @model_validator(mode="after")
    def _names_one_where_one_is_meant(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError(f"got type {self.type!r} and name {self.name!r:.80}; type 'tool' has a name, and no other")
        return self


class Thinking(BaseModel):
    """Whether the model is to think before it answers; how long is left to it."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputFormat(BaseModel):
    """What the answer must match."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """How much is thought, and what the answer must match."""

    effort: str | None = None
    format: OutputFormat | None = None


class PromptBody(Body):
    """POST /v1/messages/count_tokens, and what of /v1/messages makes the prompt."""

    messages: Annotated[list[Turn], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    system: Content | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


class MessagesBody(PromptBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    cache_salt: Salt | None = None
    prediction: Prediction | None = None
    forerun: ForerunFields | None = None


# --- answers ---------------------------------------------------------------------------------------


class WrittenText(BaseModel):
    """Text of an answer."""

    type: Literal["text"]
    text: str


class WrittenThinking(BaseModel):
    """What was thought before the answer; there is no signature, which is an empty text."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class WrittenCall(BaseModel):
    """A call of one of the request's tools."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(BaseModel):
    """Tokens read and written; of those read, what was in the prefix cache is counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class WrittenMessage(BaseModel):
    """POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[WrittenThinking | WrittenText | WrittenCall]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(BaseModel):
    """POST /v1/messages/count_tokens."""

    input_tokens: int


class MessagesErrorDetails(BaseModel):
    """What is wrong, and what to change."""

    type: str
    message: str


class MessagesErrorAnswer(BaseModel):
    """Every answer other than 200."""

    type: Literal["error"]
    error: MessagesErrorDetails
    request_id: str | None
