"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's interface: chat in other words.

A request is made into that of a chat completion (`chat_fields`), which `chat.answer` checks, lays out and generates;
`MessageResponder` writes the answer.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from forerun.core.outputs import CompletionOutput, RequestOutput
from forerun.errors import ForerunError
from forerun.models.chat.conversation import ATTRIBUTION
from forerun.models.chat.events import AnswerEvent, Arguments, CallBegin, Reasoning
from forerun.models.chat.events import Content as Text
from forerun.server.chat import answer
from forerun.server.errors import ApiError
from forerun.server.json_parts import to_json
from forerun.server.messages_protocol import (
    Block,
    MessagesBody,
    MessagesErrorAnswer,
    PromptBody,
    ThinkingBlock,
    TokenCount,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    WrittenMessage,
)
from forerun.server.protocol import ChatBody, ConversationBody, TextPart, reply
from forerun.server.reading import AnswerWriter, Reading
from forerun.server.request_params import in_clients_words, refuse_unserved, warn_once
from forerun.server.responders import Responder
from forerun.server.served_model import ServedModel, Submission, served_model
from forerun.server.translation import (
    joined,
    made,
    merged,
    named_events,
    num_prompt_tokens,
    refuse_fields_of_chat,
    renamed,
    thinking,
)

router = APIRouter()

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": MessagesErrorAnswer},
    "5XX": {"model": MessagesErrorAnswer},
}
"""Answers of these endpoints, for /openapi.json."""

OWN_NAMES = {r"\Astop:": "stop_sequences:", r"response_format(\.json_schema)?": "output_config.format"}
"""Names of the chat's fields in errors -> those of the fields that they are made of."""

SOURCES = {"messages": "messages"}
"""The chat's fields that are put together -> the field that they come from: messages of one role in a row are joined."""


@router.post("/v1/messages", responses=reply(WrittenMessage, may_stream=True) | ERRORS)
async def create_message(
    body: MessagesBody, request: Request, model: Annotated[ServedModel, Depends(served_model)]
) -> Response:
    """Answer a conversation by a message of the assistant."""
    model.check_name(body.model)
    refuse_fields_of_chat(body, body.forerun, {"max_completion_tokens": "use max_tokens", "stop": "use stop_sequences"})
    refuse_unserved(body)
    chat = made(ChatBody, chat_fields(body, model), SOURCES)
    request_id = getattr(request.state, "request_id", None)  # Ray's proxy gives none
    responder_of = partial(MessageResponder, body, chat, model, request_id)
    return await answer(chat, request, model, responder_of, must_fit=("max_tokens", None))


@router.post("/v1/messages/count_tokens", responses=reply(TokenCount) | ERRORS)
async def count_tokens(body: PromptBody, model: Annotated[ServedModel, Depends(served_model)]) -> JSONResponse:
    """How many tokens the prompt of such a message has."""
    model.check_name(body.model)
    refuse_unserved(body)
    conversation = made(ConversationBody, conversation_fields(body, model), SOURCES)
    return JSONResponse({"input_tokens": await num_prompt_tokens(conversation, model)})


# --- requests --------------------------------------------------------------------------------------


def chat_fields(body: MessagesBody, model: ServedModel) -> dict[str, Any]:
    """The request as the fields of a chat completion's."""
    given: dict[str, Any] = {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "seed": body.seed,
        "cache_salt": body.cache_salt,
        "prediction": body.prediction,
        "forerun": body.forerun,
        "parallel_tool_calls": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
    }
    if body.output_config is not None and (wanted := body.output_config.format) is not None:
        schema = {"name": "answer", "schema": wanted.json_schema, "strict": True}
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
    return conversation_fields(body, model) | given


def conversation_fields(body: PromptBody, model: ServedModel) -> dict[str, Any]:
    """The prompt as the fields of a chat completion's request; a last message of the assistant is continued."""
    messages = _messages(body)
    is_begun = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return {
        "model": body.model,
        "messages": messages,
        "add_generation_prompt": not is_begun,
        "continue_final_message": is_begun,
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": None if body.tool_choice is None else _tool_choice(body.tool_choice),
        "reasoning_effort": None if body.output_config is None else body.output_config.effort,
        "chat_template_kwargs": _thinking(body, model) | (body.chat_template_kwargs or {}),
    }


def _messages(body: PromptBody) -> list[dict[str, Any]]:
    texts = [body.system] if isinstance(body.system, str) else [part.text for part in body.system or ()]
    system = joined(ATTRIBUTION.sub("", text) for text in texts)
    said = [{"role": "system", "content": system}] if system else []
    return merged([*said, *(_part(turn.role, block) for turn in body.messages for block in turn.blocks)])


def _part(role: str, block: Block) -> dict[str, Any]:
    """A block as part of a message of the chat."""
    match block:
        case TextPart(text=text):
            return {"role": role, "content": text}
        case ThinkingBlock(thinking=thoughts):
            return {"role": role, "reasoning_content": thoughts}
        case ToolUseBlock():
            call = {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
            return {"role": role, "tool_calls": [call]}
        case ToolResultBlock():
            return _result(block)
        case _:
            return {"role": role}


def _result(block: ToolResultBlock) -> dict[str, Any]:
    text = block.content if isinstance(block.content, str) else joined(part.text for part in block.content or ())
    content = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _thinking(body: PromptBody, model: ServedModel) -> dict[str, bool]:
    if body.thinking is None:
        return {}
    variables = thinking(model, thinks=body.thinking.type != "disabled")
    if variables is None:
        warn_once("thinking")
    return variables or {}


# --- answers ---------------------------------------------------------------------------------------


class MessageResponder(Responder):
    """Writes a message of the assistant.

    Args:
        body: the request.
        chat: what was made of it.
        model: answers.
        request_id: the id that errors name, if there is one.
        reading: how the answer is read.
    """

    def __init__(
        self, body: MessagesBody, chat: ChatBody, model: ServedModel, request_id: str | None, reading: Reading
    ) -> None:
        super().__init__(streams=bool(body.stream))
        self._chat = chat
        self._most_tokens = body.max_tokens
        self._request_id = request_id
        self._reading = reading
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model.name}

    async def whole(self, submission: Submission) -> bytes:
        """The message."""
        async for _ in submission.deltas():
            pass
        (output,) = submission.outputs
        (completion,) = output.outputs
        writer = self._reading.writer()
        blocks = _blocks(writer, completion.text)
        tail = {**self._ending(completion, writer), "usage": _usage(output)}
        return f'{to_json(self._head)[:-1]},"content":[{",".join(blocks)}],{to_json(tail)[1:]}'.encode()

    async def events(self, submission: Submission) -> AsyncIterator[bytes]:
        """The message's beginning, at once; its blocks; its end, which tells what of the prompt was in the prefix cache."""
        (prompt_ids,) = submission.prompt_ids
        ending = dict.fromkeys(("stop_reason", "stop_sequence"))
        usage = _counts(len(prompt_ids), num_cached=0, num_written=0)
        message: dict[str, Any] = {**self._head, "content": [], **ending, "usage": usage}
        yield named_events([{"type": "message_start", "message": message}])
        writer = self._reading.writer()
        blocks = BlockEvents(writer.new_id)
        async for _, delta in submission.deltas():
            written = blocks.push(writer.events(delta.text, finished=delta.finish_reason is not None))
            if written:
                yield named_events(written)
        (output,) = submission.outputs
        end = {"type": "message_delta", "delta": self._ending(output.outputs[0], writer), "usage": _usage(output)}
        yield named_events([*blocks.close(), end, {"type": "message_stop"}])

    def failure(self, error: ApiError) -> bytes:
        """An event of its own; nothing follows it."""
        return named_events([error.messages_body(self._request_id)])

    def in_clients_words(self, error: ForerunError) -> ForerunError:
        """The error with Anthropic's names."""
        return renamed(in_clients_words(error, self._chat, has_tools=self._reading.tools is not None), OWN_NAMES)

    def _ending(self, completion: CompletionOutput, writer: AnswerWriter) -> dict[str, str | None]:
        """Why the answer ends, in Anthropic's words."""
        stop = completion.stop_reason
        if completion.finish_reason == "length":
            is_full = len(completion.token_ids) < self._most_tokens
            return {
                "stop_reason": "model_context_window_exceeded" if is_full else "max_tokens",
                "stop_sequence": None,
            }
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "tool_use" if writer.has_called else "end_turn", "stop_sequence": None}


def _blocks(writer: AnswerWriter, text: str) -> list[str]:
    """The JSON of each block of a whole text; a call that was cut is left out, as its arguments are no JSON."""
    blocks: list[tuple[dict[str, Any], str]] = []  # each with the JSON text of its arguments
    for part in writer.events(text, finished=True):
        last: dict[str, Any] = blocks[-1][0] if blocks else {"type": None}
        match part:
            case Text(more) if last["type"] == "text":
                last["text"] += more
            case Text(more):
                blocks.append(({"type": "text", "text": more}, ""))
            case Reasoning(more) if last["type"] == "thinking":
                last["thinking"] += more
            case Reasoning(more):
                blocks.append(({"type": "thinking", "thinking": more, "signature": ""}, ""))
            case CallBegin(name):
                blocks.append(({"type": "tool_use", "id": writer.new_id(), "name": name}, ""))
            case Arguments(more):
                blocks[-1] = (last, blocks[-1][1] + more)
    if writer.is_calling:
        blocks.pop()
    return [f'{to_json(block)[:-1]},"input":{given}}}' if given else to_json(block) for block, given in blocks]


class BlockEvents:
    """Makes a stream's events of an answer that is taken apart: each stretch of reasoning or text is a block, and each call.

    Args:
        new_id: returns an id for a call.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._index = -1  # of the last block
        self._open: str | None = None  # its type, while it is open

    def push(self, parts: Iterable[AnswerEvent]) -> list[dict[str, Any]]:
        """The events of what comes next."""
        events: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case Text(text):
                    if self._open != "text":
                        events += self._begin({"type": "text", "text": ""})
                    events.append(self._delta({"type": "text_delta", "text": text}))
                case Reasoning(text):
                    if self._open != "thinking":
                        events += self._begin({"type": "thinking", "thinking": "", "signature": ""})
                    events.append(self._delta({"type": "thinking_delta", "thinking": text}))
                case CallBegin(name):
                    events += self._begin({"type": "tool_use", "id": self._new_id(), "name": name, "input": {}})
                case Arguments(more):
                    events.append(self._delta({"type": "input_json_delta", "partial_json": more}))
        return events

    def close(self) -> list[dict[str, Any]]:
        """The end of the block that is open, if one is."""
        if self._open is None:
            return []
        signed = [self._delta({"type": "signature_delta", "signature": ""})] if self._open == "thinking" else []
        self._open = None
        return [*signed, {"type": "content_block_stop", "index": self._index}]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        end = self.close()
        self._index, self._open = self._index + 1, block["type"]
        return [*end, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _usage(output: RequestOutput) -> dict[str, int]:
    num_cached, num_written = output.num_cached_tokens or 0, len(output.outputs[0].token_ids)
    return _counts(len(output.prompt_token_ids), num_cached=num_cached, num_written=num_written)


def _counts(num_read: int, *, num_cached: int, num_written: int) -> dict[str, int]:
    return {
        "input_tokens": num_read - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_written,
    }
