"""Reads one completion from a stream, and shows it as it arrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from forerun.core.outputs import StreamDelta
from forerun.errors import RequestError

Show = Callable[[StreamDelta], None]
"""Shows a part of an answer when it arrives."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """A completion read from a stream."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first_token_seconds: float | None = None  # from the request to the first token
    seconds: float = 0.0  # from the request to the last token

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens / time from request to end, prefill included."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    def add(self, delta: StreamDelta, *, seconds: float) -> None:
        """Append a delta that arrived `seconds` after the request."""
        self.seconds = seconds
        if delta.token_ids and self.first_token_seconds is None:
            self.first_token_seconds = seconds
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


def never() -> bool:
    """Never stop: read an answer to its end."""
    return False


def hide(delta: StreamDelta) -> None:
    """Show nothing of an answer."""


def read_answer(deltas: Generator[StreamDelta, None, None], show: Show, *, stop: Callable[[], bool] = never) -> Answer:
    """Read the stream of one completion to its end or until `stop()`, and show each delta on arrival.

    A stream that is not read to its end is closed, which aborts the request.

    Raises:
        RequestError: the request failed while it ran.
    """
    answer = Answer()
    start = time.perf_counter()
    try:
        for delta in deltas:
            answer.add(delta, seconds=time.perf_counter() - start)
            show(delta)
            if stop():
                break
    finally:
        deltas.close()
    if answer.finish_reason == "error":
        raise RequestError(f"the request failed: {answer.stop_reason}")
    return answer
