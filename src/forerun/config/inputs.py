"""What a caller may give to generate, chat and stream, each in every form that vLLM takes."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from forerun.core.sampling_params import SamplingParams
from forerun.errors import RequestError, UnknownKeyError

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's {"prompt": text} / {"prompt_token_ids": ids}, with an optional "cache_salt"."""

Message = Mapping[str, Any]

CHAT_ARGUMENTS = (
    *("sampling_params", "use_tqdm", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "chat_template", "tools"),
)


def as_prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a text, a dict or a list of token ids alone is one prompt.

    Raises:
        RequestError: it is none of these, or has no order, or there is no prompt.
    """
    if isinstance(given, (str, Mapping)):
        return [given]
    listed: Any = given.tolist() if isinstance(given, Tensor) else given
    if isinstance(listed, (bytes, bytearray, Set)) or not isinstance(listed, Iterable):
        raise RequestError(
            f"prompts: got {given!r:.80}; must be a text, a list of token ids, a dict, or a list of these"
        )
    items: list[Any] = list(listed)
    if not items:
        raise RequestError("prompts: got none; give at least one")
    return [items] if isinstance(items[0], numbers.Integral) else items


def one_per_prompt(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Sampling parameters for each of `count` prompts; one for all, or None for the defaults, is repeated.

    Raises:
        RequestError: it is something else, or a list of another length.
    """
    if given is None:
        return [SamplingParams()] * count
    if isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(params, SamplingParams) for params in given):
        raise RequestError(f"sampling_params: got {given!r:.80}; must be SamplingParams or a list of them")
    if len(given) != count:
        raise RequestError(f"sampling_params: got {len(given)} for {count} prompts; give one for all or one per prompt")
    return list(given)


def as_conversations(given: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """A list of conversations; one conversation, a list of messages, counts as a list of one.

    Raises:
        RequestError: it is neither, or a conversation has no message.
    """
    is_list = isinstance(given, (list, tuple)) and len(given) > 0
    conversations: Any = [given] if is_list and isinstance(given[0], Mapping) else given
    if not is_list or not all(_is_conversation(conversation) for conversation in conversations):
        raise RequestError(
            f"messages: got {given!r:.80}; must be a list of messages such as {{'role': 'user', 'content': '...'}}"
        )
    return list(conversations)


def _is_conversation(given: Any) -> bool:
    is_list = isinstance(given, (list, tuple)) and len(given) > 0
    return is_list and all(isinstance(message, Mapping) for message in given)


def template_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Tokenizer.apply_chat_template`; vLLM's `chat_template_kwargs` are put among them.

    Raises:
        UnknownKeyError: a name is nearly that of an argument; any other may be a variable of the template.
    """
    arguments = dict(given)
    variables = arguments.pop("chat_template_kwargs", None) or {}
    if not isinstance(variables, Mapping):
        raise RequestError(f"chat_template_kwargs: got {variables!r:.80}; must be a dict of the template's variables")
    for name in arguments:
        near = difflib.get_close_matches(name, CHAT_ARGUMENTS, n=1, cutoff=0.8)
        if near and near[0] != name:
            raise UnknownKeyError(f"chat: unknown key {name!r}; did you mean {near[0]!r}?")
    return arguments | {str(name): value for name, value in variables.items()}
