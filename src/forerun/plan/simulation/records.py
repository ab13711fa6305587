"""What a simulation keeps: each request's times, and each step's."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from math import nan


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request's way, in seconds of the simulation; nan for what has not happened.

    A chunk is what one step gives: several tokens where a draft stood. `replica` is the one that decodes.
    """

    number: int
    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    replica: int = -1
    started: float = nan  # its first rows were computed from then on
    first_token: float = nan
    finished: float = nan
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    num_chunks: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    last_chunk: float = nan
    chunks: list[tuple[float, int]] | None = None  # the time and tokens of each, where they are kept

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.first_token - self.arrival

    @property
    def e2el(self) -> float:
        """End-to-end latency."""
        return self.finished - self.arrival

    @property
    def tpot(self) -> float:
        """Time per output token after the first; nan for an answer of one."""
        num_after_first = self.num_output_tokens - 1
        return (self.finished - self.first_token) / num_after_first if num_after_first else nan

    @property
    def icl(self) -> float:
        """Mean time between chunks; nan for an answer of one."""
        num_after_first = self.num_chunks - 1
        return (self.finished - self.first_token) / num_after_first if num_after_first else nan


@dataclass(slots=True)
class StepLog:
    """A replica's steps, one after the other: when each ended, how long it took, who ran, who waited, what came of it, how much KV was held while it ran."""

    ends: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    num_running: array[int] = field(default_factory=lambda: array("i"))
    num_waiting: array[int] = field(default_factory=lambda: array("i"))
    num_chunks: array[int] = field(default_factory=lambda: array("i"))
    num_tokens: array[int] = field(default_factory=lambda: array("i"))
    num_used_blocks: array[int] = field(default_factory=lambda: array("i"))

    def add(
        self,
        *,
        end: float,
        seconds: float,
        num_running: int,
        num_waiting: int,
        num_chunks: int,
        num_tokens: int,
        num_used_blocks: int,
    ) -> None:
        """Add a step."""
        self.ends.append(end)
        self.seconds.append(seconds)
        self.num_running.append(num_running)
        self.num_waiting.append(num_waiting)
        self.num_chunks.append(num_chunks)
        self.num_tokens.append(num_tokens)
        self.num_used_blocks.append(num_used_blocks)


@dataclass(slots=True)
class GapLog:
    """Times between the chunks of answers, equal ones of one step counted together."""

    seconds: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("q"))

    def add(self, seconds: float, count: int) -> None:
        """Add `count` gaps of so many seconds."""
        self.seconds.append(seconds)
        self.counts.append(count)
