"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel

from forerun.core.outputs import CompletionOutput, Logprob, RequestOutput, StreamDelta, TokenLogprobs
from forerun.errors import ForerunError, RequestError, UnknownKeyError
from forerun.server.errors import ApiError
from forerun.server.protocol import ChatBody, reply
from forerun.server.reading import AnswerWriter, Reading
from forerun.server.request_params import (
    check_length,
    check_logprobs,
    check_text_length,
    in_clients_words,
    refuse_unserved,
    sampling_params,
    wanted_structure,
)
from forerun.server.responders import Choice, Responder, ResponseBuilder, Usage, json_logprob, logprob_text
from forerun.server.served_model import ServedModel, Submission, served_model
from forerun.server.tokenization import check_template_variables, conversation_text, turns_thinking_off
from forerun.server.tool_use import tool_use

router = APIRouter()


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
    """What the model says in a conversation; `reasoning_content` and `tool_calls` are left out where there are none."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class MessageChoice(Choice):
    """A choice that answers a conversation."""

    message: AssistantMessage


class ChatCompletion(BaseModel):
    """POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[MessageChoice]
    usage: Usage


@router.post("/v1/chat/completions", responses=reply(ChatCompletion, may_stream=True))
async def create_chat_completion(
    body: ChatBody, request: Request, model: Annotated[ServedModel, Depends(served_model)]
) -> Response:
    """Answer a conversation, laid out by the model's chat template, by n completions."""
    model.check_name(body.model)
    refuse_unserved(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: is given without logprobs; set logprobs to true", param="top_logprobs")
    return await answer(body, request, model, partial(ChatBuilder, body, model), must_fit=_asked_length(body))


async def answer(
    body: ChatBody,
    request: Request,
    model: ServedModel,
    responder_of: Callable[[Reading], Responder],
    *,
    must_fit: tuple[str, int | None],
    prompt: str = "messages",
) -> Response:
    """Answer a conversation in the shape that a responder gives to the answer.

    Args:
        body: the conversation, and how it is to be answered.
        request: the HTTP request that asks for it.
        model: answers it.
        responder_of: given how the answer is read, the one who writes it.
        must_fit: name and value of a length for which the prompt must leave room; None: what fits is written.
        prompt: name of the field that the conversation came in.

    Raises:
        ApiError, RequestError: it is refused.
    """
    check_template_variables(body, model)
    wanted = wanted_structure(body)
    parallel = body.parallel_tool_calls is not False
    use = tool_use(body, model.tool_format, parallel=parallel, has_format=wanted is not None)
    if (use is not None and model.hides_calls) or model.hides_reasoning:
        body.skip_special_tokens = False
    reading = Reading(
        tokenizer=model.llm.get_tokenizer(),
        reasoning=model.reasoning_form,
        tools=use,
        may_think=not turns_thinking_off(body),
        shows_reasoning=body.include_reasoning is not False,
    )
    responder = responder_of(reading)
    most = _asked_length(body)[1]
    try:
        submitting = model.submit(
            lambda: [(None, _token_ids(body, model, reading, must_fit, prompt))],
            sampling_params(
                body,
                structure=wanted if use is None else use.structure(wanted),
                speculates=model.speculates,
                saves_hidden_states=model.saves_hidden_states,
                defaults=model.sampling_defaults,
                max_tokens=most or model.sampling_defaults.get("max_tokens"),
                logprobs=_num_top(body),
            ),
            num_prompts=1,
            streams=responder.wants_steps,
            cache_salt=body.cache_salt,
            refine=reading.sampled,
        )
        return await responder.respond(request, submitting)
    except (RequestError, UnknownKeyError) as error:
        raise responder.in_clients_words(error) from None


def _token_ids(
    body: ChatBody, model: ServedModel, reading: Reading, must_fit: tuple[str, int | None], prompt: str
) -> list[int]:
    """The conversation's, with room for the answer; made ready is also what reading it and its log probabilities need."""
    if body.logprobs:
        model.read_spellings()
    tokenizer, text = model.llm.get_tokenizer(), conversation_text(body, model)
    most, max_model_len = tokenizer.most_characters_per_token, model.llm.max_model_len
    check_text_length(text, most, max_model_len, prompt=prompt)
    if body.prediction is not None:
        check_text_length(body.prediction.text, most, max_model_len, prompt="prediction")
    token_ids = tokenizer.encode_chat(text)
    reading.begin_after(text, body)
    check_length(len(token_ids), max_model_len, prompt=prompt, asked=must_fit)
    room = max_model_len - len(token_ids)
    check_logprobs(
        _num_top(body),
        field="logprobs" if body.top_logprobs is None else "top_logprobs",
        num_completions=body.num_completions,
        most_tokens=must_fit[1] or min(model.sampling_defaults.get("max_tokens", room), room),
    )
    return token_ids


def _num_top(body: ChatBody) -> int | None:
    """How many of the likeliest tokens are reported beside each; None: no log probabilities are."""
    return (body.top_logprobs or 0) if body.logprobs else None


def _asked_length(body: ChatBody) -> tuple[str, int | None]:
    """Name and value of the answer's most tokens: the newer of the two names counts; null is the server's default, or as many as fit."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    most: int | None = getattr(body, name)
    if most == 0:
        raise ApiError(400, f"{name}: got 0; must be 1 or more, or left out for as many as fit", param=name)
    return name, most


class ChatBuilder(ResponseBuilder):
    """Messages of the assistant."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, model: ServedModel, reading: Reading) -> None:
        super().__init__(body, model)
        self._body: ChatBody = body
        self._reading = reading
        self._writers: dict[int, AnswerWriter] = {}  # by completion

    def choice(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:  # noqa: ARG002
        """The whole message."""
        writer = self._writer(completion.index)
        return {
            "message": writer.message(completion.text),
            "finish_reason": writer.finish_reason(completion.finish_reason),
            "logprobs": self._logprobs(completion.token_ids, completion.logprobs),
        }

    def chunk_choice(self, place: int, delta: StreamDelta, submission: Submission, *, is_first: bool) -> dict[str, Any]:  # noqa: ARG002
        """A step's text; the first says whose."""
        writer = self._writer(delta.index)
        opening = writer.opening if is_first else {}
        return {
            "delta": opening | writer.delta(delta.text, finished=delta.finish_reason is not None),
            "finish_reason": writer.finish_reason(delta.finish_reason),
            "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
        }

    def _writer(self, index: int) -> AnswerWriter:
        """Of one of the completions."""
        if index not in self._writers:
            self._writers[index] = self._reading.writer()
        return self._writers[index]

    def num_reasoning_tokens(self, completion: CompletionOutput) -> int | None:
        """How many of its tokens are reasoning; None where none is taken apart."""
        if self._reading.reasoning is None:
            return None
        return self._writer(completion.index).num_reasoning_tokens(completion.token_ids)

    def in_clients_words(self, error: ForerunError) -> ForerunError:
        """The error of what was made of tools names these."""
        return in_clients_words(error, self._body, has_tools=self._reading.tools is not None)

    def prompt_ids_of(self, submission: Submission) -> dict[str, Any]:
        """The one prompt's tokens, where they are asked for."""
        return {"prompt_token_ids": submission.prompt_ids[0]} if self._body.return_token_ids else {}

    def _logprobs(self, token_ids: list[int], rows: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(token_ids, rows or [], num_top=self._body.top_logprobs or 0, spell=self.model.spell)


def chat_logprobs(
    token_ids: Sequence[int], rows: Sequence[TokenLogprobs], *, num_top: int, spell: Callable[[int, str], bytes]
) -> dict[str, Any]:
    """Logprobs as one entry per token, each with its bytes and the `num_top` likeliest tokens.

    `spell` returns the bytes of a token, given its id and its text (which is U+FFFD for part of a character).
    """

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = logprob_text(logprob, token_id)
        return {"token": text, "logprob": json_logprob(logprob), "bytes": list(spell(token_id, text))}

    content = []
    for token_id, row in zip(token_ids, rows, strict=True):
        likeliest = sorted(row.items(), key=lambda item: item[1].rank or 0)[:num_top]
        tops = [entry(some_id, logprob) for some_id, logprob in likeliest]
        content.append(entry(token_id, row[token_id]) | {"top_logprobs": tops})
    return {"content": content, "refusal": None}
