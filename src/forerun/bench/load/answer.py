"""One request, and when its answer came piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt, as text or token ids, and how many tokens to write for it."""

    prompt: str | list[int]
    output_len: int
    num_prompt_tokens: int | None = None  # None: only the server knows


class Chunk(NamedTuple):
    """One piece of a streamed answer."""

    seconds: float  # since the request was sent
    has_text: bool  # it brought text, or tokens as the server counts them
    num_tokens: int | None  # output tokens so far; None: the server did not say


@dataclass(slots=True)
class Answer:
    """What came back for a request: times in seconds, counts of tokens, the text or the error."""

    request: LoadRequest
    started: float  # on the client's clock, when the request was sent
    queue_time: float = 0.0  # waited on the client's side before that
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
        """Seconds to the first chunk with text or tokens; one that opens a chat with the role alone has none."""
        return self._told[0].seconds if self.chunks else 0.0

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where there is only one."""
        num_tokens = self.num_output_tokens or 0
        return (self.latency - self.ttft) / (num_tokens - 1) if num_tokens > 1 else None

    @property
    def itls(self) -> list[float]:
        """Seconds between chunks, as vLLM counts, the empty ones included."""
        return _gaps(self._told)

    @property
    def icls(self) -> list[float]:
        """Seconds between chunks that bring text or tokens: what a reader waits."""
        return _gaps(self._bringing)

    @property
    def weighted_chunks(self) -> list[tuple[float, float]]:
        """Seconds and tokens of each chunk.

        Where the server counts tokens in each chunk, these; else the answer's tokens spread evenly.
        """
        chunks = self._bringing
        counts = [chunk.num_tokens for chunk in chunks if chunk.num_tokens is not None]
        if len(counts) < len(chunks):
            share = (self.num_output_tokens or 0) / len(chunks)
            return [(chunk.seconds, share) for chunk in chunks]
        return [
            (chunk.seconds, float(now - before))
            for chunk, before, now in zip(chunks, [0, *counts], counts, strict=False)
        ]

    @property
    def counts_chunk_tokens(self) -> bool:
        """Whether the server said with each chunk how many tokens there are."""
        return all(chunk.num_tokens is not None for chunk in self.chunks)

    @property
    def _told(self) -> list[Chunk]:
        """The chunks from the first with text on; all, if none has any."""
        first = next((place for place, chunk in enumerate(self.chunks) if chunk.has_text), 0)
        return self.chunks[first:]

    @property
    def _bringing(self) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.has_text] or self.chunks


def _gaps(chunks: list[Chunk]) -> list[float]:
    return [after.seconds - before.seconds for before, after in pairwise(chunks)]
