"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel

from forerun.core.outputs import CompletionOutput, RequestOutput, StreamDelta, TokenLogprobs
from forerun.errors import RequestError, UnknownKeyError
from forerun.models.tokenizer import TextStream, Tokenizer
from forerun.server.errors import ApiError
from forerun.server.protocol import CompletionBody, reply
from forerun.server.request_params import (
    check_length,
    check_logprobs,
    check_text_length,
    refuse_unserved,
    sampling_params,
    wanted_structure,
)
from forerun.server.responders import LEAST_LOGPROB, Choice, ResponseBuilder, Usage, json_logprob, logprob_text
from forerun.server.served_model import ServedModel, Submission, served_model

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MOST_ECHOED_LOGPROBS = 1_000_000  # of one answer: seconds of a processor, and hundreds of MB until it is written

router = APIRouter()


class TextChoice(Choice):
    """A choice that continues a prompt."""

    text: str


class Completion(BaseModel):
    """POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


@router.post("/v1/completions", responses=reply(Completion, may_stream=True))
async def create_completion(
    body: CompletionBody, request: Request, model: Annotated[ServedModel, Depends(served_model)]
) -> Response:
    """Continue prompts, texts or token ids, each by n completions."""
    model.check_name(body.model)
    refuse_unserved(body)
    _check(body)
    builder = CompletionBuilder(body, model)
    try:
        submitting = model.submit(
            lambda: _prompts(body, model),
            sampling_params(
                body,
                structure=wanted_structure(body),
                speculates=model.speculates,
                saves_hidden_states=model.saves_hidden_states,
                defaults=model.sampling_defaults,
                max_tokens=_most_tokens(body),
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
            ),
            num_prompts=len(body.prompts),
            streams=builder.wants_steps,
            cache_salt=body.cache_salt,
        )
        return await builder.respond(request, submitting)
    except (RequestError, UnknownKeyError) as error:
        raise builder.in_clients_words(error) from None


def _check(body: CompletionBody) -> None:
    """Refuse fields that do not fit each other."""
    if body.suffix:
        raise ApiError(400, "suffix: is not served; leave it out", param="suffix")
    if not body.prompts:
        raise ApiError(400, "prompt: got an empty list; give at least one", param="prompt")
    if body.max_tokens == 0 and not (body.echo and not body.stream):
        raise ApiError(
            400, "max_tokens: got 0; must be 1 or more, or 0 with echo and without stream", param="max_tokens"
        )


def _prompts(body: CompletionBody, model: ServedModel) -> list[tuple[str | None, list[int]]]:
    """Texts and token ids of the prompts, if what is asked for them is not too much."""
    max_model_len = model.llm.max_model_len
    if body.prediction is not None:
        most = model.llm.get_tokenizer().most_characters_per_token
        check_text_length(body.prediction.text, most, max_model_len, prompt="prediction")
    prompts = []
    for prompt in body.prompts:
        text, ids = _tokens(prompt, body, model)
        check_length(len(ids), max_model_len, prompt="prompt", asked=("max_tokens", body.max_tokens))
        prompts.append((text, ids))
    check_logprobs(
        body.logprobs,
        field="logprobs",
        num_completions=len(prompts) * body.num_completions,
        most_tokens=_most_tokens(body),
    )
    if body.echo and body.logprobs is not None:
        num_tokens = sum(len(ids) for _, ids in prompts)
        num_echoed = num_tokens * body.num_completions * (body.logprobs + 1)
        if num_echoed > MOST_ECHOED_LOGPROBS:
            raise ApiError(
                400,
                f"logprobs: got {body.logprobs} with echo, n {body.num_completions} and {num_tokens} tokens of prompts: "
                f"{num_echoed} log probabilities; may be {MOST_ECHOED_LOGPROBS}; send fewer prompts or make n smaller",
                param="logprobs",
            )
    return prompts


def _most_tokens(body: CompletionBody) -> int:
    """How long a completion may become; the engine always writes a token."""
    return DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)


def _tokens(prompt: str | list[int], body: CompletionBody, model: ServedModel) -> tuple[str | None, list[int]]:
    """A prompt's text (None where nothing needs it) and its token ids."""
    if isinstance(prompt, str):
        tokenizer = model.llm.get_tokenizer()
        check_text_length(prompt, tokenizer.most_characters_per_token, model.llm.max_model_len, prompt="prompt")
        return prompt, tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
    if not body.echo:
        return None, prompt
    vocab_size = model.llm.vocab_size
    known = [token_id for token_id in prompt if token_id < vocab_size]  # others are refused with a better message
    return model.llm.get_tokenizer().decode(known, skip_special_tokens=False), prompt


class CompletionBuilder(ResponseBuilder):
    """Text completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionBody, model: ServedModel) -> None:
        super().__init__(body, model)
        self._body: CompletionBody = body
        self._offsets: dict[tuple[int, int], TextOffsets] = {}  # by prompt and completion

    def choice(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """Text and logprobs, after the prompt's if it is echoed."""
        body = self._body
        prompt = (output.prompt or "") if body.echo else ""
        end: dict[str, Any] = {}
        if body.max_tokens == 0:  # the engine always writes a token
            completion.text, completion.token_ids, completion.logprobs = "", [], []
            end = {"finish_reason": "length", "stop_reason": None}
        choice: dict[str, Any] = {"text": prompt + completion.text, "logprobs": None, **end}
        if body.logprobs is not None:
            token_ids, rows = completion.token_ids, list(completion.logprobs or ())
            offsets = self._text_offsets(output.prompt_token_ids, prompt).of(token_ids)
            if body.echo:
                offsets = prompt_offsets(self._tokenizer, output.prompt_token_ids, prompt) + offsets
                token_ids, rows = output.prompt_token_ids + token_ids, [*(output.prompt_logprobs or ()), *rows]
            choice["logprobs"] = self._logprobs(token_ids, rows, offsets)
        if body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def chunk_choice(self, place: int, delta: StreamDelta, submission: Submission, *, is_first: bool) -> dict[str, Any]:
        """A step's text and logprobs; the first of an echoed prompt begins with the prompt's."""
        body, key = self._body, (place, delta.index)
        echoes = body.echo and is_first
        prompt = submission.prompts[place] if body.echo else ""
        choice: dict[str, Any] = {"text": prompt + delta.text if echoes else delta.text, "logprobs": None}
        if body.logprobs is not None:
            token_ids, prompt_ids = delta.token_ids, submission.prompt_ids[place]
            rows: list[TokenLogprobs | None] = [*(delta.logprobs or ())]
            if is_first:
                self._offsets[key] = self._text_offsets(prompt_ids, prompt)
            offsets = self._offsets[key].of(token_ids)
            if echoes:
                offsets = prompt_offsets(self._tokenizer, prompt_ids, prompt) + offsets
                token_ids, rows = prompt_ids + token_ids, submission.prompt_logprobs(place) + rows
            choice["logprobs"] = self._logprobs(token_ids, rows, offsets)
        if body.return_token_ids and is_first:
            choice["prompt_token_ids"] = submission.prompt_ids[place]
        return choice

    @property
    def _tokenizer(self) -> Tokenizer:
        return self.model.llm.get_tokenizer()

    def _text_offsets(self, prompt_ids: list[int], prompt: str) -> TextOffsets:
        """Of a completion, behind the prompt's text if it is echoed."""
        skips = self._body.skip_special_tokens is not False
        stream = self._tokenizer.stream(prompt_ids, skip_special_tokens=skips)
        return TextOffsets(self._tokenizer, stream, begin=len(prompt))

    def _logprobs(
        self, token_ids: list[int], rows: Sequence[TokenLogprobs | None], offsets: list[int]
    ) -> dict[str, Any]:
        return completion_logprobs(token_ids, rows, offsets=offsets, token_text=self.model.token_text)


class TextOffsets:
    """Where tokens begin in a text: behind what is certain without them, so all parts of a character at its beginning.

    `end` is where the text ends that is certain so far.
    """

    def __init__(self, tokenizer: Tokenizer, stream: TextStream, *, begin: int) -> None:
        self.end = begin
        self._tokenizer = tokenizer
        self._stream = stream

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Characters before each of the next tokens."""
        offsets = []
        for token_id in token_ids:
            span, own = self._stream.push(token_id), self._tokenizer.token_text(token_id)
            num_before = len(span) - len(own) if span.endswith(own) else 0  # invalid bytes that it makes certain
            offsets.append(self.end + num_before)
            self.end += len(span)
        return offsets


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Where a prompt's tokens begin in its text, in which special tokens that encoding added have no place."""
    offsets: list[int] = []
    places = TextOffsets(tokenizer, tokenizer.stream([], skip_special_tokens=False), begin=0)
    for token_id in token_ids:
        is_special = token_id in tokenizer.special_token_ids
        is_added = is_special and not text.startswith(tokenizer.token_text(token_id), places.end)
        offsets += [places.end] if is_added else places.of([token_id])
    return offsets


def completion_logprobs(
    token_ids: Sequence[int],
    rows: Sequence[TokenLogprobs | None],
    *,
    offsets: list[int],
    token_text: Callable[[int], str],
) -> dict[str, Any]:
    """Logprobs as parallel lists; the target gives none for a prompt's first token, whose row is None.

    Args:
        token_ids: the tokens whose logprobs are reported.
        rows: the logprobs at each of these positions.
        offsets: number of characters of the choice's text before each of these tokens.
        token_text: returns the text of a token that has no row.
    """
    tokens, chosen, tops = [], [], []
    for token_id, row in zip(token_ids, rows, strict=True):
        text = token_text(token_id) if row is None else logprob_text(row[token_id], token_id)
        tokens.append(text)
        chosen.append(None if row is None else json_logprob(row[token_id]))
        tops.append(None if row is None else _logprobs_by_text(row))
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}


def _logprobs_by_text(row: TokenLogprobs) -> dict[str, float]:
    """Text -> logprob; of tokens with the same text (parts of characters) the likeliest counts."""
    found: dict[str, float] = {}
    for token_id, entry in row.items():
        text = logprob_text(entry, token_id)
        found[text] = max(json_logprob(entry), found.get(text, LEAST_LOGPROB))
    return found
