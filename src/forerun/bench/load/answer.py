"""One request, its streamed answer, and the latencies of the answer under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt, as text or token ids, and the number of tokens to generate."""

    prompt: str | list[int]
    output_len: int
    num_prompt_tokens: int | None = None  # None where only the server knows


class Chunk(NamedTuple):
    """One chunk of a streamed answer."""

    seconds: float  # since the request was sent
    has_text: bool  # it has text, or tokens by the server's count
    num_tokens: int | None  # output tokens so far, or None where the server gives no count


@dataclass(slots=True)
class Answer:
    """The answer to a request: times in seconds, token counts (None: not known), and the text or the error."""

    request: LoadRequest
    started: float  # on the client's clock, when the request was sent
    queue_time: float = 0.0  # time the request waited in the client before it was sent
    chunks: list[Chunk] = field(default_factory=list)
    text: str = ""
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    error: str | None = None

    @property
    def latency(self) -> float:
        """Seconds to the last chunk, as vLLM counts; 0 if there is none."""
        return self.chunks[-1].seconds if self.chunks else 0.0

    @property
    def ttft(self) -> float:
        """Time to first token: seconds to the first chunk with text, so not one that holds only a chat's role."""
        return self._chunks_from_first_text[0].seconds if self.chunks else 0.0

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for answers of fewer than two tokens."""
        num_tokens = self.num_output_tokens or 0
        return (self.latency - self.ttft) / (num_tokens - 1) if num_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: seconds between chunks as vLLM counts them, empty chunks included."""
        return _gaps(self._chunks_from_first_text)

    @property
    def icls(self) -> list[float]:
        """Inter-chunk latencies: seconds between chunks that have text or tokens."""
        return _gaps(self._chunks_with_text)

    @property
    def weighted_chunks(self) -> list[tuple[float, float | None]]:
        """Seconds and tokens of each chunk.

        The tokens are the server's count of each chunk. Without such counts the answer's tokens are
        spread evenly over its chunks; None where these are not known.
        """
        chunks = self._chunks_with_text
        counts = [chunk.num_tokens for chunk in chunks if chunk.num_tokens is not None]
        if len(counts) < len(chunks):
            share = None if self.num_output_tokens is None else self.num_output_tokens / len(chunks)
            return [(chunk.seconds, share) for chunk in chunks]
        return [
            (chunk.seconds, float(now - before))
            for chunk, before, now in zip(chunks, [0, *counts], counts, strict=False)
        ]

    @property
    def chunk_tokens_source(self) -> str | None:
        """Where the tokens of each chunk come from: the server's usage, or an even spread; None: they are not known."""
        if all(chunk.num_tokens is not None for chunk in self.chunks):
            return "usage"
        return None if self.num_output_tokens is None else "even"

    @property
    def _chunks_from_first_text(self) -> list[Chunk]:
        """The chunks from the first with text on; all chunks if none has text."""
        first = next((place for place, chunk in enumerate(self.chunks) if chunk.has_text), 0)
        return self.chunks[first:]

    @property
    def _chunks_with_text(self) -> list[Chunk]:
        """The chunks with text; all chunks if none has text."""
        return [chunk for chunk in self.chunks if chunk.has_text] or self.chunks


def _gaps(chunks: list[Chunk]) -> list[float]:
    return [after.seconds - before.seconds for before, after in pairwise(chunks)]


class Metric(NamedTuple):
    """A latency: its short name and title, and its values in seconds, one or several per answer."""

    short: str
    title: str
    values: Callable[[Answer], Sequence[float]]


METRICS = {
    "ttft": Metric("TTFT", "Time to First Token", lambda answer: [answer.ttft]),
    "tpot": Metric(
        "TPOT",
        "Time per Output Token (excl. 1st token)",
        lambda answer: [] if answer.tpot is None else [answer.tpot],
    ),
    "itl": Metric("ITL", "Inter-token Latency", lambda answer: answer.itls),
    "icl": Metric("ICL", "Inter-chunk Latency", lambda answer: answer.icls),
    "e2el": Metric("E2EL", "End-to-end Latency", lambda answer: [answer.latency]),
    "client_queue_time": Metric("Client Queue Time", "Client-side Queueing", lambda answer: [answer.queue_time]),
    "e2el_including_client_queue": Metric(
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
        lambda answer: [answer.latency + answer.queue_time],
    ),
}
"""The latencies of an answer by vLLM's names."""

GOODPUT_METRICS = ("ttft", "tpot", "e2el")
"""The latencies that a goodput goal may limit."""
