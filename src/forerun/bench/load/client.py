"""One streamed request to an OpenAI-compatible server, against the clock."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from forerun.bench.clock import Clock
from forerun.bench.load.answer import Answer, Chunk, LoadRequest
from forerun.bench.load.endpoint import Endpoint
from forerun.bench.load.sse import EventStream

LONGEST_ERROR = 300  # characters of a server's message that are kept
DONE = b"[DONE]"


class BrokenAnswer(Exception):  # noqa: N818  # not a fault of ours: what a server sent, noted and counted
    """A stream that holds an error, or breaks off."""


async def ask(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    request: LoadRequest,
    request_id: str,
    *,
    clock: Clock = time.perf_counter,
) -> Answer:
    """Send a request and read its answer to the end; whatever goes wrong is the answer's `error`."""
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
        answer.error = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        answer.error = f"not an OpenAI stream ({type(error).__name__}: {error})"[:LONGEST_ERROR]
    return answer


async def _read(content: aiohttp.StreamReader, answer: Answer, clock: Clock) -> None:
    """Read a stream into `answer`.

    Raises:
        BrokenAnswer: it holds an error, no text, or ends too soon.
    """
    events = EventStream()
    is_whole = False
    async for piece in content.iter_any():
        seconds = clock() - answer.started
        for data in events.feed(piece):
            is_whole |= data == DONE or _note(json.loads(data), seconds, answer)
    for data in events.close():
        is_whole |= data == DONE or _note(json.loads(data), clock() - answer.started, answer)
    if not answer.chunks:
        raise BrokenAnswer("the server sent no chunk of an answer")
    if not is_whole:
        raise BrokenAnswer("the stream broke off before the answer's end")


def _note(data: dict[str, Any], seconds: float, answer: Answer) -> bool:
    """Add what one event says to `answer`; whether it is the answer's last with text.

    Usage may come in an event of its own, as it should, with the last text, or with every chunk.

    Raises:
        BrokenAnswer: it is an error.
    """
    if "error" in data:
        raise BrokenAnswer(f"error in the stream: {_message(json.dumps(data).encode())}")
    choices, usage = data.get("choices"), data.get("usage")
    before, num_tokens = answer.num_output_tokens or 0, None
    says_each_time = not answer.chunks or answer.chunks[-1].num_tokens is not None
    if usage:
        answer.num_prompt_tokens = usage.get("prompt_tokens", answer.num_prompt_tokens)
        answer.num_output_tokens = num_tokens = usage.get("completion_tokens", answer.num_output_tokens)
    if not choices:
        return False
    text, has_text = _text(choices[0])
    answer.text += text
    has_tokens = says_each_time and (num_tokens or 0) > before
    answer.chunks.append(Chunk(seconds, has_text or has_tokens, num_tokens))
    return choices[0].get("finish_reason") is not None


def _text(choice: Mapping[str, Any]) -> tuple[str, bool]:
    """A choice's text, and whether it brings any: thoughts and calls of tools count too."""
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    text = choice.get("text") or delta.get("content") or ""
    return thought + text, bool(thought or text or delta.get("tool_calls"))


def _message(body: bytes) -> str:
    """What an error says, in OpenAI's shape or any other, on one line."""
    try:
        found = json.loads(body)["error"]
        text = found["message"] if isinstance(found, dict) else found
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:LONGEST_ERROR] or "no message"
