"""The bodies of requests: OpenAI's fields, vLLM's further ones, and our own `forerun` object.

Types are strict (no "5" for 5), null means left out, and fields that are not here are kept in
`model_extra` for `request_params.refuse_unserved` to judge.

A body may have a million mistakes, and recording each would keep the event loop from all other requests: lists
end at the first (`fail_fast`), and objects are looked at before their entries are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from forerun.core.structured_outputs import KINDS
from forerun.models.chat.conversation import WRITING_ROLE, called_arguments, not_too_deep

MOST_COMPLETIONS = 16  # the largest n
MOST_PROMPTS = 64
MOST_STOPS = 16  # OpenAI takes 4; code tasks of evaluations have more
MOST_STOP_CHARACTERS = 1024  # of one stop string; each is searched for after every token
MOST_MESSAGES = 2048
MOST_LOGPROBS = 20
MOST_TOOLS = 128  # OpenAI's limit
MOST_CALLS = 128  # tool calls of one message
MOST_ALLOWED_TOKENS = 1 << 16
MOST_DETOKENIZED = 1 << 18  # as many as any text has
MOST_STOP_TOKENS = 1024  # each prompt keeps them in a set of its own
MOST_BIASES = 1024
MOST_BAD_WORDS = 256
MOST_BAD_WORD_CHARACTERS = 256
LARGEST_BIAS = 100.0  # OpenAI's range

INT64 = 2**63
Count = Annotated[int, Field(ge=0, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
AllowedTokens = Annotated[list[TokenId], Field(max_length=MOST_ALLOWED_TOKENS, fail_fast=True)]
StopTokens = Annotated[list[TokenId], Field(max_length=MOST_STOP_TOKENS, fail_fast=True)]
Bias = Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS)]
TopLogprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]
Stop = Annotated[str, Field(max_length=MOST_STOP_CHARACTERS)]
BadWord = Annotated[str, Field(max_length=MOST_BAD_WORD_CHARACTERS)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]  # OpenAI takes 64 characters, Anthropic 128
Salt = Annotated[str, Field(min_length=1, max_length=1024)]


class Body(BaseModel):
    """A request's JSON object."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ClosedObject(BaseModel):
    """An object without further keys."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_others(cls, given: Any) -> Any:
        """Refuse the first key that is not known; pydantic would record them all."""
        for key in given if isinstance(given, dict) else ():
            if key not in cls.model_fields:
                raise ValueError(f"got the key {key!r:.80}; may have {', '.join(cls.model_fields)}; leave it out")
        return given


class ForerunFields(ClosedObject):
    """What only this server understands, in a namespace of its own.

    `origins` asks how each token came to be: see `origins.Origins`.
    """

    speculation: Literal["on", "off"] | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, le=128)] | None = None
    origins: bool | None = False


class TextPart(BaseModel):
    """A piece of a text."""

    type: Literal["text"]
    text: str


def _only_text(content: Any) -> Any:
    """Refuse parts that are no text in a sentence that names them; the union of types below has none."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is not None and kind != "text":
            raise ValueError(f"got a part of type {kind!r:.40}; this model reads text only; send parts of type 'text'")
    return content


Content = Annotated[str | Annotated[list[TextPart], Field(fail_fast=True)], BeforeValidator(_only_text)]


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Prediction(ClosedObject):
    """The text that a client expects: OpenAI's predicted output."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        """The text in one piece."""
        return _joined(self.content)


def _few_biases(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MOST_BIASES:
        raise ValueError(f"got {len(given)} entries; may have {MOST_BIASES}; leave out those near 0")
    return given


Biases = Annotated[dict[str, Bias], Field(max_length=MOST_BIASES), BeforeValidator(_few_biases)]


class SamplingBody(Body):
    """How an answer is written, whatever the endpoint."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MOST_BAD_WORDS, fail_fast=True)] | None = None
    allowed_token_ids: AllowedTokens | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    min_tokens: Count | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stop_token_ids: StopTokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = False
    cache_salt: Salt | None = None
    prediction: Prediction | None = None
    user: str | None = None
    forerun: ForerunFields | None = None

    @property
    def own(self) -> ForerunFields:
        """Our own fields, whether given or not."""
        return self.forerun or ForerunFields()


def _object_with(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


RESPONSE_FORMAT = {
    "anyOf": [
        _object_with(
            {
                "type": {"enum": ["text", "json_object", "json_schema", "structural_tag", "regex", "choice"]},
                "json_schema": _object_with({"schema": {"type": "object"}, "strict": {"type": "boolean"}}, "schema"),
                "regex": {"type": "string"},
                "choice": {"type": "array", "items": {"type": "string"}},
            },
            "type",
        ),
        {"type": "null"},
    ]
}
STRUCTURED_OUTPUTS = {"anyOf": [_object_with({kind: {} for kind in KINDS}), {"type": "null"}]}


class GenerationBody(SamplingBody):
    """What completions and chat completions have in common.

    What the answer must match is checked by `request_params.wanted_structure`, whose errors say more than types can.
    """

    response_format: Annotated[Any, WithJsonSchema(RESPONSE_FORMAT)] = None
    structured_outputs: Annotated[Any, WithJsonSchema(STRUCTURED_OUTPUTS)] = None
    n: Annotated[int, Field(ge=1, le=MOST_COMPLETIONS)] | None = 1
    best_of: int | None = None
    max_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def num_completions(self) -> int:
        """Completions per prompt."""
        return self.n or 1


PromptIds = Annotated[list[TokenId], Field(fail_fast=True)]
Prompts = (
    str
    | Annotated[list[str], Field(max_length=MOST_PROMPTS, fail_fast=True)]
    | PromptIds
    | Annotated[list[PromptIds], Field(max_length=MOST_PROMPTS, fail_fast=True)]
)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = False
    logprobs: TopLogprobs | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt: text or token ids."""
        match self.prompt:
            case str():
                return [self.prompt]
            case [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
            case _:
                return list(self.prompt)  # type: ignore[arg-type]


# --- tools -----------------------------------------------------------------------------------------


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError("its type must be 'object'")
    return not_too_deep(schema)


Parameters = Annotated[dict[str, Any], AfterValidator(_parameters)]


class FunctionBody(BaseModel):
    """A function that the model may call; fields that are not here go to the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class ToolBody(BaseModel):
    """A tool."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"] = "function"
    function: FunctionBody


class NamedFunction(BaseModel):
    """A function by its name."""

    model_config = ConfigDict(strict=True)

    name: str


class NamedChoice(BaseModel):
    """The one tool that is to be called."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(BaseModel):
    """Some of the tools by their names, and whether one of them must be called."""

    model_config = ConfigDict(strict=True)

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MOST_TOOLS, fail_fast=True)]


class AllowedChoice(BaseModel):
    """The tools that may be called; the model sees all of them, so that the prompt stays the same whatever is chosen."""

    model_config = ConfigDict(strict=True)

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(BaseModel):
    """A function and what it was called with; the arguments come as JSON text."""

    model_config = ConfigDict(strict=True)

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(called_arguments)]


class CallBody(BaseModel):
    """A call of an earlier turn."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


Tools = Annotated[list[ToolBody], Field(max_length=MOST_TOOLS, fail_fast=True)]
Calls = Annotated[list[CallBody], Field(max_length=MOST_CALLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


# --- conversations ---------------------------------------------------------------------------------


class Message(BaseModel):
    """One message of a conversation; fields that are not here go to the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content | None = None
    tool_calls: Calls | None = None

    @property
    def text(self) -> str:
        """The content in one piece."""
        return _joined(self.content or "")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        """Refuse what would be laid out as an empty message, as after a misspelt `content`; only the model may say nothing."""
        if self.content is None and self.role != WRITING_ROLE:
            raise ValueError(f"has no content, and role {self.role!r:.20}; give it a text, which may be empty")
        return self


class ConversationBody(Body):
    """Messages and how the model's chat template lays them out."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None


class ChatBody(ConversationBody, GenerationBody):
    """POST /v1/chat/completions."""

    max_completion_tokens: Count | None = None
    logprobs: bool | None = False
    top_logprobs: TopLogprobs | None = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool | None = True


class TokenizeTextBody(Body):
    """POST /tokenize, of a text."""

    prompt: str
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class TokenizeChatBody(ConversationBody):
    """POST /tokenize, of a conversation."""

    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Annotated[list[TokenId], Field(max_length=MOST_DETOKENIZED, fail_fast=True)]


# --- answers ---------------------------------------------------------------------------------------


def reply(model: type[BaseModel], *, may_stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """A route's `responses` for /openapi.json: JSON like the model, and events where a request asks for them."""
    stream: dict[str, Any] = {"content": {"text/event-stream": {}}} if may_stream else {}
    return {200: {"model": model, **stream}}
