"""What a request asks of the engine: its fields as `SamplingParams`, what its text must match, and what is refused.

A field that nobody knows is ignored with one warning. A field that would constrain the answer in a way
that is not served is refused, for whoever sends it relies on it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from forerun.core.sampling_params import SamplingParams
from forerun.core.structured_outputs import KINDS
from forerun.errors import ForerunError, RequestError
from forerun.server.errors import ApiError
from forerun.server.protocol import Body, ForerunFields, GenerationBody

logger = logging.getLogger(__name__)

SAME_NAME = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("bad_words", "allowed_token_ids", "seed", "min_tokens", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
)
"""Fields with the same name and meaning in requests and in `SamplingParams`; null is the default."""

CONSTRAINING = ("guided", "grammar", "structural", "json_schema", "regex", "ebnf", "logits_processor")
"""Beginnings of the names of fields that say what the answer must look like."""

STRUCTURING = ("response_format", "structured_outputs")
"""Fields that say what the answer must match and that are served."""

FORMAT_FIELDS = {"json": "json_schema.schema", "regex": "regex", "choice": "choice"}
"""Kinds of structures -> where they stand in `response_format`; the others are all of it."""

LENIENT = {"x-guidance": {"lenient": True}}
"""What makes llguidance match as much of a schema as it can; where a schema has options of its own, these count."""

TEXTS = ("prompt", "messages", "tools", "chat_template_kwargs", "reasoning_effort", "prediction")
"""Fields whose texts are made into tokens."""

UNSERVED = {
    "add_special_tokens": "the chat template writes them",
    "chat_template": "templates come with the model, not with requests; lay the prompt out and use /v1/completions",
    "documents": "put them into a message",
    "dry_multiplier": "use repetition_penalty or frequency_penalty",
    "echo": "it is for /v1/completions",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "logprob_token_ids": "use logprobs",
    "max_completion_tokens": "it is for /v1/chat/completions; use max_tokens",
    "mcp_servers": "connect to them in the client, and give their tools",
    "mirostat": "use temperature, top_p, top_k and min_p",
    "modalities": "only text is served",
    "audio": "only text is served",
    "output_format": "use output_config.format",
    "prompt_embeds": "send text or token ids",
    "prompt_logprobs": "use /v1/completions with echo and logprobs",
    "repeat_penalty": "use repetition_penalty",
    "repetition_detection": "use stop and max_tokens",
    "return_tokens_as_token_ids": "use return_token_ids",
    "spaces_between_special_tokens": "texts are made without a choice of it",
    "thinking_token_budget": "use max_tokens",
    "tool_choice": "tools are for /v1/chat/completions",
    "tools": "tools are for /v1/chat/completions",
    "truncate_prompt_tokens": "shorten the prompt",
    "typical_p": "use temperature, top_p, top_k and min_p",
    "use_beam_search": "use n for several answers",
    "vllm_xargs": "leave it out",
    "web_search_options": "search, and put what you find into a message",
    "xtc_probability": "use temperature, top_p, top_k and min_p",
}
"""Fields that would change the answer -> what to do instead."""

MEANINGLESS: tuple[Any, ...] = (None, False, [], {}, "none")
"""Values that ask for nothing."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dry_multiplier": (None, 0, 0.0),
    "guided_json": (None,),  # {} is the schema of any JSON
    "json_schema": (None,),
    "mirostat": (None, 0),
    "modalities": (*MEANINGLESS, ["text"]),
    "prompt_logprobs": (None,),
    "repeat_penalty": (None, 1, 1.0),
    "spaces_between_special_tokens": (None, True),
    "typical_p": (None, 1, 1.0),
    "web_search_options": (None,),
    "xtc_probability": (None, 0, 0.0),
}
"""Fields that are refused -> the values that ask for nothing, where these are not `MEANINGLESS`."""

MOST_WARNINGS = 100
MOST_LOGPROBS_OF_SEVERAL = 4_000_000  # completions of one answer: a GB or two, until the last of them has ended
TOO_LONG = "context_length_exceeded"  # OpenAI's code

_warned: set[str] = set()


def refuse_unserved(body: Body, *, further: Mapping[str, str] | None = None) -> None:
    """Refuse what would change the answer, and warn once of each other field that is ignored.

    Args:
        body: the request.
        further: more of `UNSERVED` than all endpoints refuse.

    Raises:
        ApiError: 400, a field constrains the answer.
    """
    unserved = UNSERVED | dict(further or {})
    for name, value in (body.model_extra or {}).items():
        asks_for_nothing = any(
            value == neutral and type(value) is type(neutral) for neutral in NEUTRAL.get(name, MEANINGLESS)
        )
        is_of_the_answer = name in STRUCTURING and name not in unserved  # where there is none, but the prompt's tokens
        if asks_for_nothing or is_of_the_answer:  # 0 is equal to False, but asks for something
            continue
        if name in unserved:
            raise ApiError(400, f"{name}: is not served; leave it out ({unserved[name]})", param=name)
        if name.startswith(CONSTRAINING):
            raise ApiError(
                400,
                f"{name:.80}: answers cannot be constrained so; write response_format or structured_outputs",
                param=name[:80],
            )
        warn_once(name)


def wanted_structure(body: Body) -> Mapping[str, Any] | None:
    """What `SamplingParams.structured_outputs` takes, from OpenAI's `response_format` or vLLM's `structured_outputs`.

    A `response_format` of type 'text' asks for nothing.

    Raises:
        ApiError: 400, both are given, or one is not what it may be.
    """
    given = _given_structures(body)
    if len(given) > 1:
        raise ApiError(
            400, "response_format: is given with structured_outputs; leave one of them out", param="response_format"
        )
    if "structured_outputs" in given:
        wanted = given["structured_outputs"]
        if not isinstance(wanted, Mapping):
            raise ApiError(
                400, f"structured_outputs: got {wanted!r:.80}; must be an object", param="structured_outputs"
            )
        return wanted
    return _of_format(given["response_format"]) if given else None


def _given_structures(body: Body) -> dict[str, Any]:
    """The fields of `STRUCTURING` that ask for something."""
    given = {name: getattr(body, name, None) for name in STRUCTURING}
    wanted = given.get("response_format")
    if isinstance(wanted, Mapping) and wanted.get("type") == "text":
        del given["response_format"]
    return {name: value for name, value in given.items() if value is not None}


def in_clients_words(error: ForerunError, body: Body, *, has_tools: bool = False) -> ForerunError:
    """The error with the field's name as the client wrote it, where the engine calls it otherwise.

    `has_tools`: what the text must match was made of tools.
    """
    message = str(error)
    subject, _, rest = message.partition(": ")
    given = _given_structures(body)
    has_format = "response_format" in given
    source = "tools" if has_tools else "response_format" if has_format else "structured_outputs"
    if subject in (*KINDS, "disable_any_whitespace", "whitespace_pattern"):
        own = subject
        if subject == "structural_tag":  # behind reasoning, whatever is wanted is one
            wanted = given.get("structured_outputs") or {}
            own = next((kind for kind in KINDS if wanted.get(kind) is not None), subject)
        place = "" if has_tools else FORMAT_FIELDS.get(subject, "") if has_format else own
        return RequestError(f"{'.'.join(filter(None, (source, place)))}: {rest}")
    if subject == "StructuredOutputs":
        return RequestError(f"structured_outputs: {rest}")
    if subject in ("structured_outputs", "ignore_eos", "sampling"):
        return RequestError(message.replace("structured_outputs", source, 1))
    if subject in ("include_output_tokens", "hidden_states_path"):
        return RequestError(f"kv_transfer_params.{message}")
    if subject == "text":
        return RequestError(f"{_field_of_half_characters(body)}: {rest}")
    return error


def _field_of_half_characters(body: Body) -> str:
    """The first field that no tokenizer takes, as it holds half of a surrogate pair."""
    given = {name: value for name in TEXTS if (value := getattr(body, name, None)) is not None}
    for name, value in given.items():
        try:
            json.dumps(value, ensure_ascii=False, default=BaseModel.model_dump).encode()
        except UnicodeEncodeError:
            return name
    return next(iter(given))


def _of_format(wanted: Any) -> Mapping[str, Any] | None:
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if isinstance(wanted, Mapping) and kind == "json_object":
        if wanted.get("schema") is not None:
            raise ApiError(
                400,
                "response_format: type 'json_object' takes no schema; give it as json_schema.schema, with type 'json_schema'",
                param="response_format",
            )
        return {"json_object": True}
    if isinstance(wanted, Mapping) and kind == "json_schema":
        named = wanted.get("json_schema")
        if isinstance(named, Mapping) and isinstance(named.get("schema"), Mapping):
            return {"json": named["schema"] if _is_strict(named) else LENIENT | named["schema"]}
        raise ApiError(
            400,
            "response_format: type 'json_schema' needs json_schema.schema, an object; give the schema there",
            param="response_format",
        )
    if isinstance(wanted, Mapping) and kind in ("regex", "choice") and wanted.get(kind) is not None:
        return {kind: wanted[kind]}
    if isinstance(wanted, Mapping) and kind == "structural_tag":
        return {"structural_tag": wanted}
    if kind in ("regex", "choice"):
        raise ApiError(
            400,
            f"response_format: type {kind!r} needs a field {kind!r}; give what is to be matched there",
            param="response_format",
        )
    raise ApiError(
        400,
        f"response_format: got type {kind!r:.80}; may be 'text', 'json_object', 'json_schema', 'structural_tag', 'regex' or "
        "'choice', the last two with a field of that name",
        param="response_format",
    )


def _is_strict(named: Mapping[str, Any]) -> bool:
    strict = named.get("strict")
    if not isinstance(strict, bool | None):
        raise ApiError(
            400,
            f"response_format: got json_schema.strict {strict!r:.80}; must be true or false",
            param="response_format",
        )
    return bool(strict)


def warn_once(name: str) -> None:
    """Log that a field is ignored, the first time that it is."""
    if name in _warned or len(_warned) >= MOST_WARNINGS:
        return
    _warned.add(name)
    logger.warning("requests carry the field %.80r, which is not known here; it is ignored", name)


def sampling_params(
    body: GenerationBody,
    *,
    structure: Mapping[str, Any] | None,
    speculates: bool,
    saves_hidden_states: bool,
    defaults: Mapping[str, Any],
    **more: Any,
) -> SamplingParams:
    """How a request is sampled; `more` are the fields that the two endpoints name differently.

    `structure` is what its text must match; `defaults` are values of fields that the request leaves out.

    Raises:
        ApiError: 400, a value does not fit the others.
        RequestError: a value is out of range.
    """
    if body.best_of not in (None, 1, body.num_completions):
        raise ApiError(
            400, f"best_of: got {body.best_of!r:.80}; must be n ({body.num_completions}); leave it out", param="best_of"
        )
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            400, "stream_options: is given without stream; set stream to true, or leave it out", param="stream_options"
        )
    if body.kv_transfer_params and not saves_hidden_states:
        raise ApiError(
            400,
            "kv_transfer_params: is given, but this server saves no hidden states; leave it out, or start the server with "
            "--kv-transfer-config and method 'extract_hidden_states'",
            param="kv_transfer_params",
        )
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    return SamplingParams(
        n=body.num_completions,
        logit_bias=_bias(body.logit_bias),
        structured_outputs=structure,
        speculation=_speculation(body.own, speculates=speculates),
        prediction=None if body.prediction is None else body.prediction.text,
        extra_args={"kv_transfer_params": body.kv_transfer_params} if body.kv_transfer_params else None,
        **{**defaults, **given, **more},
    )


def check_text_length(text: str, most_characters_per_token: int | None, max_model_len: int, *, prompt: str) -> None:
    """Refuse a text that is too long whatever its tokens are, before it is made into tokens, which takes a second a megabyte or two.

    Raises:
        ApiError: 400, as by `check_length`.
    """
    if most_characters_per_token is not None and len(text) > max_model_len * most_characters_per_token:
        kind = "prediction" if prompt == "prediction" else "prompt"
        least = -(-len(text) // most_characters_per_token)
        message = (
            f"{prompt}: got {len(text)} characters; this model's maximum context length is {max_model_len} tokens of at most "
            f"{most_characters_per_token} characters; the {kind} is too long: at least {least} tokens > {max_model_len} maximum; shorten it"
        )
        raise ApiError(400, message, param=prompt, code=TOO_LONG)


def check_length(num_tokens: int, max_model_len: int, *, prompt: str, asked: tuple[str, int | None]) -> None:
    """Refuse a prompt that leaves no room for the answer that is asked for, as OpenAI's and vLLM's servers do.

    Args:
        num_tokens: tokens of the prompt.
        max_model_len: tokens of the prompt and the answer, at most.
        prompt: name of the prompt's field.
        asked: name of the field that says how long the answer may be, and its value.

    Raises:
        ApiError: 400, with the code and the words by which clients know that they must shorten something.
    """
    context = f"this model's maximum context length is {max_model_len} tokens"
    name, most = asked
    if num_tokens >= max_model_len:
        message = (
            f"{prompt}: the prompt is too long: {num_tokens} tokens > {max_model_len - 1} maximum; {context}, which hold the answer "
            "too; shorten it"
        )
        raise ApiError(400, message, param=prompt, code=TOO_LONG)
    room = max_model_len - num_tokens
    if most is not None and most > room:
        message = f"{name}: got {most}; {context} and {prompt} has {num_tokens}; may be at most {room}, or left out"
        raise ApiError(400, message, param=name, code=TOO_LONG)


def check_logprobs(num_top: int | None, *, field: str, num_completions: int, most_tokens: int) -> None:
    """Refuse several completions that may come to more log probabilities than are kept until the last of them ends.

    A single one is not refused: as long as it runs, its KV takes more memory than they do.

    Args:
        num_top: the likeliest tokens that are reported beside each token; None: nothing is.
        field: name of the field that says how many.
        num_completions: of all prompts together.
        most_tokens: of a completion.

    Raises:
        ApiError: 400.
    """
    if num_top is None or num_completions == 1:
        return
    count = num_completions * most_tokens * (num_top + 1)
    if count > MOST_LOGPROBS_OF_SEVERAL:
        message = (
            f"{field}: got {num_top} likeliest beside each of up to {most_tokens} tokens of {num_completions} completions: {count} "
            f"log probabilities; may be {MOST_LOGPROBS_OF_SEVERAL}; send fewer prompts, or make n, max_tokens or {field} smaller"
        )
        raise ApiError(400, message, param=field)


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    """JSON's keys are strings."""
    if not given:
        return None
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ApiError(400, f"logit_bias: got the key {key!r:.80}; must be a token id", param="logit_bias")
    return {int(key): value for key, value in given.items()}


def _speculation(own: ForerunFields, *, speculates: bool) -> Any:
    """What `SamplingParams.speculation` takes."""
    most = own.num_speculative_tokens
    if own.speculation == "off":
        if most:
            raise ApiError(
                400,
                f"forerun.num_speculative_tokens: got {most} with speculation 'off'; leave one of them out",
                param="forerun",
            )
        return "off"
    if own.speculation == "on" and not speculates:
        raise ApiError(
            400,
            "forerun.speculation: got 'on', but this server drafts nothing; start it with --speculative-config",
            param="forerun",
        )
    return None if most is None else {"num_speculative_tokens": most}
