"""Tokenization: how conversations become token ids, and vLLM's endpoints /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Discriminator, Tag

from forerun.errors import RequestError
from forerun.models.chat import conversation
from forerun.server.errors import ApiError
from forerun.server.json_parts import to_json_in_parts
from forerun.server.protocol import ConversationBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody, reply
from forerun.server.request_params import in_clients_words, refuse_unserved, warn_once
from forerun.server.served_model import ServedModel, served_model
from forerun.server.tool_use import offered

router = APIRouter()
info_router = APIRouter()


THINKING_VARIABLES = ("enable_thinking", "thinking")
"""What templates call the variable that says whether the model thinks first: Qwen3's and GLM's, DeepSeek's and Granite's."""


class Tokens(BaseModel):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    """POST /detokenize."""

    prompt: str


def _kind(body: Any) -> str:
    has_messages = isinstance(body, dict) and body.get("messages") is not None
    return "TokenizeChatBody" if has_messages or isinstance(body, TokenizeChatBody) else "TokenizeTextBody"


TokenizeBody = Annotated[
    Annotated[TokenizeTextBody, Tag("TokenizeTextBody")] | Annotated[TokenizeChatBody, Tag("TokenizeChatBody")],
    Discriminator(_kind),
]
"""A conversation where there are messages, else a text; a mistake is told of that one alone."""


@router.post("/tokenize", responses=reply(Tokens))
async def tokenize(body: TokenizeBody, model: Annotated[ServedModel, Depends(served_model)]) -> Response:
    """Token ids of a text, or of a conversation laid out by the chat template."""
    model.check_name(body.model)
    refuse_unserved(body)
    tokenizer = model.llm.get_tokenizer()
    if isinstance(body, TokenizeChatBody):
        check_template_variables(body, model)

    def answer() -> Response:
        if isinstance(body, TokenizeChatBody):
            token_ids = tokenizer.encode_chat(conversation_text(body, model))
        else:
            token_ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        texts = [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
        found = {
            "count": len(token_ids),
            "max_model_len": model.llm.max_model_len,
            "tokens": token_ids,
            "token_strs": texts,
        }
        return Response(to_json_in_parts(found), media_type="application/json")

    try:
        return await model.in_thread(answer)
    except RequestError as error:
        raise in_clients_words(error, body) from None


@router.post("/detokenize", responses=reply(Text))
async def detokenize(body: DetokenizeBody, model: Annotated[ServedModel, Depends(served_model)]) -> JSONResponse:
    """The text of token ids, special tokens included."""
    model.check_name(body.model)
    refuse_unserved(body)
    tokenizer = model.llm.get_tokenizer()
    unknown = next((token_id for token_id in body.tokens if token_id >= tokenizer.vocab_size), None)
    if unknown is not None:
        raise ApiError(400, f"tokens: got {unknown}; must be below {tokenizer.vocab_size}", param="tokens")
    text = await model.in_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return JSONResponse({"prompt": text})


@info_router.get("/tokenizer_info")
async def tokenizer_info(model: Annotated[ServedModel, Depends(served_model)]) -> JSONResponse:
    """What a client needs to lay out prompts by itself."""
    tokenizer = model.llm.get_tokenizer()
    return JSONResponse(
        {
            "tokenizer_class": tokenizer.kind,
            "chat_template": tokenizer.chat_template,
            "model_max_length": model.llm.max_model_len,
            "vocab_size": tokenizer.vocab_size,
            **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")),
            **tokenizer.special_tokens,
        }
    )


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


def turns_thinking_off(body: ConversationBody) -> bool:
    """Whether the template is told that the model is not to think."""
    given = body.chat_template_kwargs or {}
    return any(given.get(name) is False for name in THINKING_VARIABLES)


def conversation_text(body: ConversationBody, model: ServedModel) -> str:
    """The conversation as the model reads it; its tools go to the template, or into texts where that reads none.

    Raises:
        ApiError: 400, tools and choice do not fit.
        RequestError: the template refuses the messages.
    """
    tokenizer = model.llm.get_tokenizer()
    system = "developer" if "developer" in str(tokenizer.chat_template) else "system"  # most templates drop other roles
    return conversation.lay_out(
        tokenizer,
        [message.model_dump() | ({"role": system} if message.role == "developer" else {}) for message in body.messages],
        tools=[tool.model_dump() for tool in offered(body)],
        form=model.tool_format,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        render=model.templates.render,
        variables=_effort(body, model) | (body.chat_template_kwargs or {}),
    )


def _effort(body: ConversationBody, model: ServedModel) -> dict[str, str]:
    """OpenAI's field as the variable of that name, where the template reads it."""
    if body.reasoning_effort is None:
        return {}
    if "reasoning_effort" not in model.template_variables:
        warn_once("reasoning_effort")
        return {}
    return {"reasoning_effort": body.reasoning_effort}
