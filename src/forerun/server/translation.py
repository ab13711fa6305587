"""A chat in other words: what the endpoints share whose requests are made into that of a chat completion."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from forerun.errors import ForerunError, RequestError
from forerun.server.errors import ApiError
from forerun.server.protocol import Body, ChatBody, ConversationBody, ForerunFields
from forerun.server.request_params import in_clients_words
from forerun.server.responders import event
from forerun.server.served_model import ServedModel
from forerun.server.tokenization import THINKING_VARIABLES, check_template_variables, conversation_text

ChatFields = TypeVar("ChatFields", bound=ConversationBody)

BETWEEN_PARTS = "\n\n"


def refuse_fields_of_chat(body: Body, own: ForerunFields | None, instead: Mapping[str, str]) -> None:
    """Refuse what is served for a chat completion and would be ignored here.

    Args:
        body: the request.
        own: its fields that only this server understands.
        instead: what to do instead, of such fields as have a counterpart here.

    Raises:
        ApiError: 400, there is such a field.
    """
    further = {name for name, value in (body.model_extra or {}).items() if value is not None}
    others = sorted(further & ChatBody.model_fields.keys())
    if own is not None and own.origins:
        others.append("forerun.origins")
    if others:
        name = others[0]
        raise ApiError(
            400,
            f"{name}: is for /v1/chat/completions; {instead.get(name, 'leave it out')}",
            param=name.partition(".")[0],
        )


def made(kind: type[ChatFields], fields: dict[str, Any], sources: Mapping[str, str]) -> ChatFields:
    """The body of a chat completion's request, checked as if it had come as one.

    Args:
        kind: what to make.
        fields: its fields.
        sources: fields that were put together from a field of the client's -> its name. Errors name it alone, as places within
            are others.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        found = [{**one, "loc": ("body", *_own_place(one["loc"], sources))} for one in error.errors()]
    raise RequestValidationError(found, body={sources.get(name, name): value for name, value in fields.items()})


def _own_place(place: Sequence[int | str], sources: Mapping[str, str]) -> Sequence[int | str]:
    field, *_ = place
    return [sources[field]] if isinstance(field, str) and field in sources else place


def merged(parts: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chat's messages, given parts of them in the same form: those of one role in a row are one, but for results of calls.

    What the system says further on is the user's: many templates take the system's message in the first place only, and moved
    there it would keep the conversation from the prefix cache.
    """
    messages: list[dict[str, Any]] = []
    for role, run in groupby(_placed(parts), key=itemgetter("role")):
        same = list(run)
        messages += map(dict, same) if role == "tool" else [_one_message(role, same)]
    return messages


def _placed(parts: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    is_beginning = True
    for part in parts:
        is_beginning = is_beginning and part["role"] == "system"
        yield part if is_beginning or part["role"] != "system" else {**part, "role": "user"}


def _one_message(role: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    calls = [call for part in parts for call in part.get("tool_calls", ())]
    thoughts = joined(part.get("reasoning_content", "") for part in parts)
    return {
        "role": role,
        "content": joined(part.get("content", "") for part in parts),
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": thoughts} if thoughts else {}),
    }


def joined(texts: Iterable[str]) -> str:
    """Texts as one, with an empty line between them."""
    return BETWEEN_PARTS.join(filter(None, texts))


def thinking(model: ServedModel, *, thinks: bool) -> dict[str, bool] | None:
    """Whether the model thinks first, in the variables that its template has for that; None where it has none."""
    names = [name for name in THINKING_VARIABLES if name in model.template_variables]
    return dict.fromkeys(names, thinks) if names else None


async def num_prompt_tokens(conversation: ConversationBody, model: ServedModel) -> int:
    """How many tokens the prompt of such a conversation has.

    Raises:
        ApiError, RequestError: it is refused, in the chat's words.
    """
    check_template_variables(conversation, model)
    tokenizer = model.llm.get_tokenizer()
    try:
        return await model.in_thread(lambda: len(tokenizer.encode_chat(conversation_text(conversation, model))))
    except RequestError as error:
        raise in_clients_words(error, conversation) from None


def renamed(error: ForerunError, names: Mapping[str, str]) -> RequestError:
    """The error with other names of fields; `names` has patterns of the chat's."""
    message = str(error)
    for name, own in names.items():
        message = re.sub(name, own, message)
    return RequestError(message)


def named_events(events: Iterable[dict[str, Any]]) -> bytes:
    """Events as they stand on the wire, each named by its type."""
    return b"".join(b"event: %b\n%b" % (one["type"].encode(), event(one)) for one in events)
