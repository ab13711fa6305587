"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from forerun.core.outputs import CompletionOutput, RequestOutput, StreamDelta, TokenLogprobs
from forerun.errors import RequestError
from forerun.server.answers import Answers
from forerun.server.constraints import refuse_unserved, wanted_structure
from forerun.server.errors import ApiError
from forerun.server.generation import Shape
from forerun.server.logprobs import chat_logprobs
from forerun.server.protocol import ChatBody, ConversationBody
from forerun.server.replies import ChatCompletion, reply
from forerun.server.sampling import sampling_params
from forerun.server.served_model import ServedModel, served_model
from forerun.server.tools.call_writer import CallWriter
from forerun.server.tools.presentation import as_text
from forerun.server.tools.use import ToolUse, offered, tool_use

router = APIRouter()


@router.post("/v1/chat/completions", responses=reply(ChatCompletion, may_stream=True))
async def create_chat_completion(
    body: ChatBody, request: Request, model: Annotated[ServedModel, Depends(served_model)]
) -> Response:
    """Answer a conversation, laid out by the model's chat template, by n completions."""
    model.check_name(body.model)
    refuse_unserved(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: is given without logprobs; set logprobs to true", param="top_logprobs")
    check_template_variables(body, model)
    use = tool_use(body, model.tool_format, parallel=body.parallel_tool_calls is not False)
    wanted = wanted_structure(body)
    if use is not None and model.hides_calls:
        body.skip_special_tokens = False
    shape = ChatShape(body, model, use)
    try:
        answers = await model.answer(
            lambda: [(None, lay_out(body, model))],
            sampling_params(
                body,
                structure=wanted if use is None else use.structure(wanted),
                speculates=model.speculates,
                max_tokens=_max_tokens(body),
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            ),
            num_prompts=1,
            streams=shape.wants_steps,
            cache_salt=body.cache_salt,
        )
    except RequestError as error:
        if use is None:
            raise
        raise _of_tools(error) from error
    return await shape.respond(request, answers)


def _of_tools(error: RequestError) -> RequestError:
    """A complaint about a grammar that was made of tools, about these."""
    return RequestError(str(error).replace("structural_tag:", "tools:", 1))


def _max_tokens(body: ChatBody) -> int | None:
    """The newer of the two names counts; null is as many as fit."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    most: int | None = getattr(body, name)
    if most == 0:
        raise ApiError(400, f"{name}: got 0; must be 1 or more, or left out for as many as fit", param=name)
    return most


def check_template_variables(body: ConversationBody, model: ServedModel) -> None:
    """Raise `ApiError` unless the model's template reads every variable that is given."""
    for name in body.chat_template_kwargs or {}:
        if name not in model.template_variables:
            known = ", ".join(sorted(model.template_variables)) or "none"
            raise ApiError(
                400,
                f"chat_template_kwargs: the template has no variable {name!r:.80}; it has: {known}",
                param="chat_template_kwargs",
            )


def lay_out(body: ConversationBody, model: ServedModel) -> list[int]:
    """Token ids of the conversation; its tools go to the template, or into texts where that reads none.

    Raises:
        ApiError: 400, tools and choice do not fit.
    """
    messages = [message.for_template() for message in body.messages]
    tools = [tool.for_template() for tool in offered(body)]
    if model.tool_template is None and model.tool_format is not None:
        messages, tools = as_text(messages, tools, model.tool_format), []
    return model.llm.get_tokenizer().apply_chat_template(
        messages,
        tools=tools or None,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        render=model.templates.render,
        **(body.chat_template_kwargs or {}),
    )


class ChatShape(Shape):
    """Messages of the assistant."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, model: ServedModel, tools: ToolUse | None) -> None:
        super().__init__(body, model)
        self._body: ChatBody = body
        self._tools = tools
        self._writers: dict[int, CallWriter] = {}  # by completion

    def choice(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:  # noqa: ARG002
        """The whole message."""
        logprobs = {"logprobs": self._logprobs(completion.token_ids, completion.logprobs)}
        if self._tools is None:
            message = {"role": "assistant", "content": completion.text, "refusal": None}
            return {"message": message, **logprobs}
        writer = self._tools.writer()
        message = writer.message(completion.text)
        return {"message": message, "finish_reason": writer.finish_reason(completion.finish_reason), **logprobs}

    def chunk_choice(self, place: int, delta: StreamDelta, answers: Answers, *, is_first: bool) -> dict[str, Any]:  # noqa: ARG002
        """A step's text; the first says whose."""
        logprobs = {"logprobs": self._logprobs(delta.token_ids, delta.logprobs)}
        if self._tools is None:
            message = {"role": "assistant", "content": delta.text} if is_first else {"content": delta.text}
            return {"delta": message, **logprobs}
        if delta.index not in self._writers:
            self._writers[delta.index] = self._tools.writer()
        writer = self._writers[delta.index]
        opening: dict[str, Any] = {"role": "assistant", "content": None} if is_first else {}
        message = opening | writer.delta(delta.text, finished=delta.finish_reason is not None)
        return {"delta": message, "finish_reason": writer.finish_reason(delta.finish_reason), **logprobs}

    def prompt_ids_of(self, answers: Answers) -> dict[str, Any]:
        """The one prompt's tokens, where they are asked for."""
        return {"prompt_token_ids": answers.prompt_ids[0]} if self._body.return_token_ids else {}

    def _logprobs(self, token_ids: list[int], rows: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(token_ids, rows or [], num_top=self._body.top_logprobs or 0, spell=self.model.spell)
