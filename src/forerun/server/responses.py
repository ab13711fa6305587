"""POST /v1/responses and /v1/responses/input_tokens, OpenAI's newer interface: chat in other words.

A request is made into that of a chat completion (`chat_fields`), which `chat.answer` checks, lays out and generates;
`ResponsesResponder` writes the answer. Nothing is kept: each request brings its whole conversation.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import cached_property, partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from forerun.core.outputs import CompletionOutput, RequestOutput, StreamDelta, TokenLogprobs
from forerun.errors import ForerunError, RequestError
from forerun.models.chat.events import Content as Text
from forerun.server.chat import answer, chat_logprobs
from forerun.server.errors import ApiError
from forerun.server.json_parts import to_json, to_json_in_parts
from forerun.server.protocol import ChatBody, ConversationBody, SamplingBody, reply
from forerun.server.reading import AnswerWriter, Reading
from forerun.server.request_params import in_clients_words, refuse_unserved, warn_once
from forerun.server.responders import Responder, metrics_of, reports_steps, usage_of
from forerun.server.responses_output import Output
from forerun.server.responses_protocol import (
    AllowedTools,
    CallItem,
    CallOutputItem,
    Content,
    FunctionTool,
    InputTokens,
    Item,
    MessageItem,
    NamedFunction,
    NamespaceTool,
    PlainFormat,
    PromptBody,
    ReasoningItem,
    ResponsesBody,
    SchemaFormat,
    WrittenResponse,
)
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

LOGPROBS = "message.output_text.logprobs"
NOT_KEPT = "responses are not kept here: there is none to read, to cancel, to delete or to go on from; send the whole conversation as input"
OWN_NAMES = {r"\Amessages:": "input:", r"response_format(\.json_schema)?": "text.format"}
"""Names of the chat's fields in errors -> those of the fields that they are made of."""

SOURCES = {"messages": "input", "tools": "tools"}
"""The chat's fields that are put together -> the field that they come from."""

UNSERVED = {
    "background": "nothing is kept here; wait for the answer, or stream it",
    "context_management": "shorten the conversation in the client",
    "conversation": "nothing is kept here; send the whole conversation as input",
    "max_completion_tokens": "use max_output_tokens",
    "max_tokens": "use max_output_tokens",
    "messages": "use input",
    "moderation": "have texts judged elsewhere",
    "previous_response_id": "nothing is kept here; send the whole conversation as input",
    "prompt": "prompt templates are OpenAI's; write the prompt as instructions and input",
    "reasoning_effort": "use reasoning.effort",
    "response_format": "use text.format",
}
"""Fields that would change the answer -> what to do instead, besides those of all endpoints."""


@router.post("/v1/responses", responses=reply(WrittenResponse, may_stream=True))
async def create_response(
    body: ResponsesBody, request: Request, model: Annotated[ServedModel, Depends(served_model)]
) -> Response:
    """Answer a conversation by items: text, and calls of functions."""
    model.check_name(body.model)
    refuse_fields_of_chat(body, body.forerun, UNSERVED)
    refuse_unserved(body, further=UNSERVED)
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        message = f"top_logprobs: is given without log probabilities; add {LOGPROBS!r} to include"
        raise ApiError(400, message, param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        message = "stream_options: is given without stream; set stream to true, or leave it out"
        raise ApiError(400, message, param="stream_options")
    chat = made(ChatBody, chat_fields(body, model), SOURCES)
    responder_of = partial(ResponsesResponder, body, chat, model)
    return await answer(chat, request, model, responder_of, must_fit=("max_output_tokens", None), prompt="input")


@router.post("/v1/responses/input_tokens", responses=reply(InputTokens))
async def count_input_tokens(body: PromptBody, model: Annotated[ServedModel, Depends(served_model)]) -> JSONResponse:
    """How many tokens the prompt of such a request has."""
    model.check_name(body.model)
    refuse_unserved(body, further=UNSERVED)
    conversation = made(ConversationBody, conversation_fields(body, model), SOURCES)
    try:
        num_tokens = await num_prompt_tokens(conversation, model)
    except RequestError as error:
        raise renamed(error, OWN_NAMES) from None
    return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})


@router.api_route("/v1/responses/{response_id:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
async def find_response(response_id: str) -> None:  # noqa: ARG001
    """Say that there is none."""
    raise ApiError(404, NOT_KEPT)


# --- requests --------------------------------------------------------------------------------------


def chat_fields(body: ResponsesBody, model: ServedModel) -> dict[str, Any]:
    """The request as the fields of a chat completion's."""
    given = {name: getattr(body, name) for name in SamplingBody.model_fields}
    given |= {
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": LOGPROBS in (body.include or ()),
        "top_logprobs": body.top_logprobs,
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    if body.text is not None and body.text.verbosity is not None:
        warn_once("text.verbosity")
    match None if body.text is None else body.text.format:
        case SchemaFormat() as wanted:
            schema = {"name": wanted.name, "schema": wanted.json_schema, "strict": wanted.strict}
            given["response_format"] = {"type": "json_schema", "json_schema": schema}
        case PlainFormat() as wanted:
            given["response_format"] = {"type": wanted.type}
    return given | conversation_fields(body, model)


def conversation_fields(body: PromptBody, model: ServedModel) -> dict[str, Any]:
    """The prompt as the fields of a chat completion's request."""
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    effort = None if body.reasoning is None else body.reasoning.effort
    variables = thinking(model, thinks=False) if effort == "none" else None
    return {
        "model": body.model,
        "messages": merged([*instructions, *map(_part, filter(_says_something, body.input))]),
        "tools": None if body.tools is None else [_tool(space, tool) for space, tool in _functions(body)],
        "tool_choice": _tool_choice(body),
        "reasoning_effort": None if variables else effort,
        "chat_template_kwargs": (variables or {}) | (body.chat_template_kwargs or {}),
    }


def _says_something(item: Item) -> bool:
    """Whether an item is more than thoughts that only OpenAI's service can read."""
    return not isinstance(item, ReasoningItem) or bool(item.content or item.summary)


def _part(item: Item) -> dict[str, Any]:
    """An item as part of a message of the chat."""
    match item:
        case MessageItem():
            role = "system" if item.role == "developer" else item.role
            return {"role": role, "content": _text(item.content)}
        case CallItem():
            function = {"name": _seen_name(item.namespace, item.name), "arguments": item.arguments}
            return {"role": "assistant", "tool_calls": [{"id": item.call_id, "function": function}]}
        case CallOutputItem():
            return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
        case ReasoningItem():
            thoughts = joined(one.text for one in item.content or item.summary or ())
            return {"role": "assistant", "reasoning_content": thoughts}


def _text(content: Content) -> str:
    return content if isinstance(content, str) else joined(part.text for part in content)


def _functions(body: PromptBody) -> list[tuple[str | None, FunctionTool]]:
    """Each function with the namespace that it stands in."""
    functions: list[tuple[str | None, FunctionTool]] = []
    for tool in body.tools or ():
        if isinstance(tool, NamespaceTool):
            functions += ((tool.name, one) for one in tool.tools)
        else:
            functions.append((None, tool))
    return functions


def _seen_name(space: str | None, name: str) -> str:
    """The name by which the model knows a function."""
    return name if space is None else f"{space}__{name}"


def _tool(space: str | None, tool: FunctionTool) -> dict[str, Any]:
    function = {
        "name": _seen_name(space, tool.name),
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _tool_choice(body: PromptBody) -> str | dict[str, Any] | None:
    match body.tool_choice:
        case NamedFunction() as named:
            return {"type": "function", "function": {"name": _seen_name(named.namespace, named.name)}}
        case AllowedTools() as choice:
            names = [_seen_name(tool.namespace, tool.name) for tool in choice.tools]
            allowed = [{"type": "function", "function": {"name": name}} for name in names]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": allowed}}
        case "auto" if not _functions(body):  # clients send it in any case
            return None
        case choice:
            return choice


# --- answers ---------------------------------------------------------------------------------------


class ResponsesResponder(Responder):
    """Writes a response: its items, and what OpenAI's clients expect around them.

    Args:
        body: the request.
        chat: what was made of it.
        model: answers.
        reading: how the answer is read.

    Raises:
        ApiError: 400, log probabilities are asked for where there may be calls, whose tokens are no text.
    """

    def __init__(self, body: ResponsesBody, chat: ChatBody, model: ServedModel, reading: Reading) -> None:
        super().__init__(streams=bool(body.stream))
        if chat.logprobs and reading.tools is not None:
            message = f"include: {LOGPROBS!r} is given with tools; leave one of them out, or set tool_choice to 'none'"
            raise ApiError(400, message, param="include")
        self._chat = chat
        self._model = model
        self._reading = reading
        spaces = {
            _seen_name(space, tool.name): (space, tool.name) for space, tool in _functions(body) if space is not None
        }
        self._output = Output(self._new_call_id, spaces)
        self._has_text = reading.reasoning is None  # else reasoning may come first
        self._waiting: list[tuple[int, TokenLogprobs]] = []  # tokens, until text has begun
        self._head = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time())}
        self._repeated = _repeated(body, model)
        self._num_events = 0

    @property
    def wants_steps(self) -> bool:
        """Whether the answer is made of single steps."""
        return self._streams or reports_steps(self._model)

    async def whole(self, submission: Submission) -> bytes:
        """The response."""
        steps = [delta async for _, delta in submission.deltas()]
        (output,) = submission.outputs
        return await asyncio.to_thread(self._whole, output, steps)  # log probabilities may be long

    def _whole(self, output: RequestOutput, steps: list[StreamDelta]) -> bytes:
        (completion,) = output.outputs
        self._push(completion.text, completion.token_ids, completion.logprobs, finished=True)
        self._end(completion)
        return to_json_in_parts(self._response(**self._ending(output, steps))).encode()

    async def events(self, submission: Submission) -> AsyncIterator[bytes]:
        """The response's beginning, at once; its items; its end."""
        for kind in ("created", "in_progress"):
            yield self._written([{"type": f"response.{kind}", "response": self._response(status="in_progress")}])
        steps = list[StreamDelta]()
        async for _, delta in submission.deltas():
            if reports_steps(self._model):
                steps.append(delta)
            events = self._push(delta.text, delta.token_ids, delta.logprobs, finished=delta.finish_reason is not None)
            if events:
                yield self._written(events)
        (output,) = submission.outputs
        events = self._end(output.outputs[0])
        ending = self._ending(output, steps)
        events.append({"type": f"response.{ending['status']}", "response": self._response(**ending)})
        yield await asyncio.to_thread(self._written, events)  # they repeat all of the answer

    def failure(self, error: ApiError) -> bytes:
        """An event that OpenAI's clients raise, and one with the response as far as it came, which Codex reads.

        The first has the error at two places: where it is described, and where the client looks for it.
        """
        told = error.body["error"]
        code = "invalid_prompt" if error.status_code < 500 else "server_error"
        flat = {name: told[name] for name in ("message", "param", "code")}
        failed = self._response(status="failed", error={"code": code, "message": told["message"]})
        return self._written(
            [{"type": "error", **flat, "error": told}, {"type": "response.failed", "response": failed}]
        )

    def in_clients_words(self, error: ForerunError) -> ForerunError:
        """The error with this interface's names."""
        return renamed(in_clients_words(error, self._chat, has_tools=self._reading.tools is not None), OWN_NAMES)

    def _push(
        self, text: str, token_ids: Sequence[int], rows: Sequence[TokenLogprobs] | None, *, finished: bool
    ) -> list[dict[str, Any]]:
        """More of the answer's text, taken apart: the events of what comes of it."""
        parts = self._writer.events(text, finished=finished)
        has_text = any(isinstance(part, Text) for part in parts)
        logprobs = self._logprobs(token_ids, rows or (), has_text=has_text or finished)
        if logprobs and not has_text:
            parts.append(Text(""))
        return self._output.push(parts, logprobs=logprobs, is_calling=self._writer.is_calling)

    def _end(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        is_cut = completion.finish_reason == "length" or self._writer.is_calling
        return self._output.close("incomplete" if is_cut else "completed")

    def _logprobs(
        self, token_ids: Sequence[int], rows: Sequence[TokenLogprobs], *, has_text: bool
    ) -> list[dict[str, Any]]:
        """Those of the text's tokens, where they are asked for: from where it begins, as its reasoning has no place for any."""
        if not self._chat.logprobs:
            return []
        self._waiting += zip(token_ids, rows, strict=True)
        if has_text and not self._has_text:
            self._has_text = True
            del self._waiting[: self._writer.num_reasoning_tokens([token_id for token_id, _ in self._waiting])]
        if not self._has_text:
            return []
        ids, told = [token_id for token_id, _ in self._waiting], [row for _, row in self._waiting]
        self._waiting = []
        num_top, spell = self._chat.top_logprobs or 0, self._model.spell
        content: list[dict[str, Any]] = chat_logprobs(ids, told, num_top=num_top, spell=spell)["content"]
        return content

    @cached_property
    def _writer(self) -> AnswerWriter:
        """Of the one completion, once it has begun."""
        return self._reading.writer()

    def _new_call_id(self) -> str:
        return self._writer.new_id()

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        absent = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
        return {**self._head, "status": status, "output": self._output.items, **self._repeated, **absent, **more}

    def _ending(self, output: RequestOutput, steps: list[StreamDelta]) -> dict[str, Any]:
        """What a response has at its end."""
        is_cut = output.outputs[0].finish_reason == "length"
        return {
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": self._usage(output),
            **metrics_of(self._model, [output], steps),
        }

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        counted = usage_of([output], lambda completion: self._writer.num_reasoning_tokens(completion.token_ids))
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **counted["prompt_tokens_details"]},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": counted["completion_tokens_details"],
            "total_tokens": counted["total_tokens"],
        }

    def _written(self, events: Iterable[dict[str, Any]]) -> bytes:
        numbered = [{**one, "sequence_number": self._num_events + place} for place, one in enumerate(events)]
        self._num_events += len(numbered)
        return named_events(numbered)


def _repeated(body: ResponsesBody, model: ServedModel) -> dict[str, Any]:
    """What a response repeats of its request, and what never differs.

    Raises:
        ApiError: 400, a field cannot be repeated.
    """
    defaults = {name: model.sampling_defaults.get(name, 1.0) for name in ("temperature", "top_p")}
    same = ("instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user")
    given = body.model_dump(
        include={*same, *defaults, "reasoning", "text", "tool_choice"}, by_alias=True, exclude_none=True
    )
    repeated = {
        "model": model.name,
        **{name: given.get(name) for name in same},
        **{name: given.get(name, default) for name, default in defaults.items()},
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None} | given.get("reasoning", {}),
        "text": {"format": {"type": "text"}} | given.get("text", {}),
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "truncation": "disabled",
    }
    for name, value in repeated.items():
        try:
            to_json(value).encode()
        except ValueError:
            message = f"{name}: holds half of a surrogate pair, or a number that JSON has not; leave it out"
            raise ApiError(400, message, param=name) from None
    return repeated
