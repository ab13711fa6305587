"""One request in the engine, and the chunks that Dynamo's frontend gets of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from forerun.core.outputs import RequestOutput, StreamDelta, TokenLogprobs
from forerun.errors import ErrorKind, RequestError
from forerun.server.engine_thread import EngineError, Event

Chunk = dict[str, Any]
"""`GenerateChunk` of `dynamo.common.backend`."""


class TokenStream:
    """Takes a request's events and gives its tokens: all of a step in one chunk, and of several steps if nobody read meanwhile.

    Args:
        num_prompt_tokens: as the frontend counts them.
        num_top_logprobs: how many of the likeliest tokens are reported beside each; None: no logprobs are.
    """

    streams = True

    def __init__(self, *, num_prompt_tokens: int, num_top_logprobs: int | None) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_top_logprobs = num_top_logprobs
        self._num_written = 0
        self.is_cancelled = False
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()

    def take(self, event: Event) -> None:
        """Take what the engine gives (see `Reader`)."""
        self._events.put_nowait(event)

    def cancel(self) -> None:
        """End the chunks: nobody wants more."""
        self.is_cancelled = True
        self._events.put_nowait(None)

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """The tokens as steps give them; the last chunk says why they end.

        Raises:
            RequestError: the request's own rules failed, such as a grammar that allows nothing.
            EngineError: the engine failed.
        """
        deltas: list[StreamDelta] = []
        while True:
            event = await self._events.get()
            while isinstance(event, StreamDelta):
                deltas.append(event)
                if self._events.empty():
                    break
                event = self._events.get_nowait()
            match event:
                case StreamDelta():
                    if event.finish_reason is None:
                        yield self._chunk(deltas)
                        deltas = []
                case RequestOutput():
                    yield self._last_chunk(deltas, event)
                    return
                case None:
                    yield self._chunk(deltas) | self._ending("cancelled")
                    return
                case _:
                    raise event

    def _last_chunk(self, deltas: Sequence[StreamDelta], output: RequestOutput) -> Chunk:
        (completion,) = output.outputs
        if output.error is not None:
            if output.error_kind == ErrorKind.REQUEST:
                raise RequestError(output.error)
            raise EngineError(output.error)
        is_end_token = completion.finish_reason == "stop" and completion.stop_reason is None
        reason = "eos" if is_end_token else str(completion.finish_reason)
        return self._chunk(deltas) | self._ending(reason, output.num_cached_tokens or 0)

    def _ending(self, reason: str, num_cached_tokens: int = 0) -> Chunk:
        return ending(reason, self._num_prompt_tokens, self._num_written, num_cached_tokens=num_cached_tokens)

    def _chunk(self, deltas: Sequence[StreamDelta]) -> Chunk:
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        self._num_written += len(token_ids)
        chunk: Chunk = {"token_ids": token_ids, "index": 0}
        if self._num_top_logprobs is not None:
            rows = [row for delta in deltas for row in delta.logprobs or ()]
            chunk["log_probs"] = [row[token_id].logprob for row, token_id in zip(rows, token_ids, strict=True)]
            chunk["top_logprobs"] = [_top(row, self._num_top_logprobs) for row in rows]
        return chunk


def nothing_left(num_prompt_tokens: int) -> Chunk:
    """The only chunk of a text that is complete already."""
    return {"token_ids": [], "index": 0} | ending("length", num_prompt_tokens, 0)


def ending(reason: str, num_prompt_tokens: int, num_written: int, *, num_cached_tokens: int = 0) -> Chunk:
    """What the last chunk has besides its tokens."""
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_written,
        "total_tokens": num_prompt_tokens + num_written,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
    return {"finish_reason": reason, "completion_usage": usage}


def _top(row: TokenLogprobs, count: int) -> list[dict[str, Any]]:
    """The likeliest tokens of a row; the one that was taken is among them only if it is as likely."""
    ranked = sorted((one.rank, token_id, one) for token_id, one in row.items() if one.rank is not None)
    return [
        {"rank": rank, "token_id": token_id, "token": one.decoded_token, "logprob": one.logprob}
        for rank, token_id, one in ranked
        if rank <= count
    ]
