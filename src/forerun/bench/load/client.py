"""Sends one streamed request to an OpenAI-compatible server and times its answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from forerun.bench.instruments import Clock
from forerun.bench.load.answer import Answer, Chunk, LoadRequest
from forerun.bench.load.workload import Backend

MAX_ERROR_LENGTH = 300  # characters kept of a server's error message
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The URL that requests are sent to, and the parts that all requests share."""

    url: str
    backend: Backend
    model: str
    body: Mapping[str, Any]  # sampling parameters and other keys; they replace keys of the same name
    headers: Mapping[str, str]

    def payload(self, request: LoadRequest) -> dict[str, Any]:
        """The JSON body of a request."""
        if self.backend == "openai-chat":
            message = {"role": "user", "content": request.prompt}
            asked: dict[str, Any] = {"messages": [message], "max_completion_tokens": request.output_len}
        else:
            asked = {"prompt": request.prompt, "max_tokens": request.output_len}
        # continuous_usage_stats: servers that support it count the tokens of each chunk
        usage = {"include_usage": True, "continuous_usage_stats": True}
        return {"model": self.model, **asked, "stream": True, "stream_options": usage, **self.body}


class BrokenAnswer(Exception):  # noqa: N818 - the server's failure, which is recorded in the answer
    """The server sent an error or an incomplete stream."""


async def ask(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    request: LoadRequest,
    request_id: str,
    *,
    clock: Clock = time.perf_counter,
) -> Answer:
    """Send a request and read its answer to the end; failures are recorded as the answer's `error`, not raised."""
    payload = json.dumps(endpoint.payload(request)).encode()
    headers = {"Content-Type": "application/json", **endpoint.headers, "x-request-id": request_id}
    answer = Answer(request, started=clock())
    try:
        async with session.post(endpoint.url, data=payload, headers=headers) as response:
            if response.status != 200:
                raise BrokenAnswer(f"{response.status} {response.reason}: {_message(await response.read())}")
            await _read(response.content, answer, clock)
    except BrokenAnswer as error:
        answer.error = str(error)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:MAX_ERROR_LENGTH]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        answer.error = f"not an OpenAI stream ({type(error).__name__}: {error})"[:MAX_ERROR_LENGTH]
    return answer


async def _read(content: aiohttp.StreamReader, answer: Answer, clock: Clock) -> None:
    """Read a stream into `answer`.

    Raises:
        BrokenAnswer: the stream holds an error, has no chunk or ends before the answer does.
    """
    events = EventStream()
    is_whole = False
    async for piece in content.iter_any():
        seconds = clock() - answer.started
        for data in events.feed(piece):
            is_whole |= data == DONE or _add_event(json.loads(data), seconds, answer)
    for data in events.close():
        is_whole |= data == DONE or _add_event(json.loads(data), clock() - answer.started, answer)
    if not answer.chunks:
        raise BrokenAnswer("the server sent no chunk of an answer")
    if not is_whole:
        raise BrokenAnswer("the stream broke off before the answer's end")


def _add_event(data: dict[str, Any], seconds: float, answer: Answer) -> bool:
    """Add an event to `answer` and return whether it has a finish reason.

    Servers send usage in an event of its own (OpenAI's way), with the last text, or with every chunk.

    Raises:
        BrokenAnswer: the event is an error.
    """
    if "error" in data:
        raise BrokenAnswer(f"error in the stream: {_message(json.dumps(data).encode())}")
    choices, usage = data.get("choices"), data.get("usage")
    before, num_tokens = answer.num_output_tokens or 0, None
    counts_every_chunk = not answer.chunks or answer.chunks[-1].num_tokens is not None
    if usage:
        answer.num_prompt_tokens = usage.get("prompt_tokens", answer.num_prompt_tokens)
        answer.num_output_tokens = num_tokens = usage.get("completion_tokens", answer.num_output_tokens)
    if not choices:
        return False
    text, has_text = _text(choices[0])
    answer.text += text
    has_tokens = counts_every_chunk and (num_tokens or 0) > before
    answer.chunks.append(Chunk(seconds, has_text or has_tokens, num_tokens))
    return choices[0].get("finish_reason") is not None


def _text(choice: Mapping[str, Any]) -> tuple[str, bool]:
    """A choice's text, and whether it has any; reasoning and tool calls count as text."""
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    text = choice.get("text") or delta.get("content") or ""
    return thought + text, bool(thought or text or delta.get("tool_calls"))


def _message(body: bytes) -> str:
    """The message of an error body, in OpenAI's format or any other, on one line."""
    try:
        found = json.loads(body)["error"]
        text = found["message"] if isinstance(found, dict) else found
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:MAX_ERROR_LENGTH] or "no message"


class EventStream:
    """Parses server-sent events (WHATWG HTML, 9.2) from pieces of bytes that need not end with an event."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Add bytes and return the data of the events that they complete; comments are skipped."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = [self._add_line(line.removesuffix(b"\r")) for line in lines]
        return [data for data in events if data is not None]

    def close(self) -> list[bytes]:
        """The data of a last event without a blank line after it."""
        return self.feed(b"\n\n")

    def _add_line(self, line: bytes) -> bytes | None:
        """The data of the event that a blank `line` ends; None for other lines."""
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            return None
        data, self._data = self._data, []
        return b"\n".join(data) if data else None
