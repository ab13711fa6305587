"""A fake OpenAI-compatible server with scripted answers, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Script:
    """How every request is answered."""

    chunks: list[int] = field(default_factory=lambda: [1, 1, 1, 1])  # tokens of each
    first_delay: float = 0.0  # seconds
    delay: float = 0.0  # between chunks
    usage: str = "own"  # in a chunk of its "own", with each ("continuous"), with the "last", or "none"
    fail_with: tuple[int, str] | None = None  # status and body
    break_after: int | None = None  # chunks, then the stream ends without a word
    error_after: int | None = None  # chunks, then an error event
    listed: list[dict[str, Any]] = field(default_factory=lambda: [{"id": "fake", "root": "fake-root"}])
    num_loading: int = 0  # looks at its health that it is still loading at
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    on_request: Callable[[], object] = lambda: None
    most_at_once: int = 0
    drafts: bool = True
    counts_drafts: bool = True
    num_drafts: int = 0
    url: str = ""


@contextmanager
def serving(script: Script) -> Iterator[Script]:
    """Serve on a free port while the block runs."""
    ready = threading.Event()
    stop: list[Callable[[], object]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        return await _answer(request, script)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": script.listed})

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": "fake 1"})

    async def health(request: web.Request) -> web.Response:
        script.num_loading = max(script.num_loading - 1, -1)
        return web.Response(status=503 if script.num_loading >= 0 else 200)

    async def metrics(request: web.Request) -> web.Response:
        return _metrics(script)

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        app.router.add_post("/v1/chat/completions", answer)
        app.router.add_get("/v1/models", models)
        app.router.add_get("/version", version)
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/health", health)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        script.url = "http://{}:{}".format(*runner.addresses[0])
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        stop.append(lambda: loop.call_soon_threadsafe(stopped.set))
        ready.set()
        await stopped.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield script
    finally:
        stop[0]()
        thread.join(10)


def _metrics(script: Script) -> web.Response:
    """Each answer is 10 drafts of 3 tokens, of which 2 are accepted."""
    if not script.counts_drafts:
        return web.Response(text="")
    lines = [
        f'vllm:spec_decode_num_drafts_total{{engine="0"}} {script.num_drafts}',
        f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {3 * script.num_drafts}',
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {2 * script.num_drafts}',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {script.num_drafts}',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {script.num_drafts}',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 0',
    ]
    return web.Response(text="\n".join(lines))


async def _answer(request: web.Request, script: Script) -> web.StreamResponse:
    script.bodies.append(await request.json())
    script.headers.append(request.headers)
    script.on_request()
    if script.fail_with is not None:
        return web.Response(status=script.fail_with[0], text=script.fail_with[1])
    script.num_drafts += 10 * script.drafts
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    _running[id(script)] = _running.get(id(script), 0) + 1
    script.most_at_once = max(script.most_at_once, _running[id(script)])
    try:
        for event in _events(script, is_chat=request.path.endswith("/chat/completions")):
            if isinstance(event, float):
                await asyncio.sleep(event)
            else:
                await response.write(f"data: {event}\n\n".encode())
    finally:
        _running[id(script)] -= 1
    await response.write_eof()
    return response


_running: dict[int, int] = {}


def _events(script: Script, *, is_chat: bool) -> Iterator[float | str]:
    """Seconds to wait, and the data of events."""
    usage = {"prompt_tokens": 7, "completion_tokens": 0}
    if is_chat:
        yield json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    yield script.first_delay
    for number, num_tokens in enumerate(script.chunks):
        if number == script.break_after:
            return
        if number == script.error_after:
            yield json.dumps({"error": {"message": "out of luck", "code": 500}})
            return
        if number:
            yield script.delay
        usage = {**usage, "completion_tokens": usage["completion_tokens"] + num_tokens}
        is_last = number == len(script.chunks) - 1
        text = "x" * num_tokens
        choice = {"delta": {"content": text}} if is_chat else {"text": text}
        chunk = {"choices": [{"index": 0, **choice, "finish_reason": "length" if is_last else None}], "usage": None}
        if script.usage == "continuous" or (script.usage == "last" and is_last):
            chunk["usage"] = usage
        yield json.dumps(chunk)
    if script.usage in ("own", "continuous"):
        yield json.dumps({"choices": [], "usage": usage})
    yield "[DONE]"
