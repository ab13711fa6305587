"""Output that several commands share: a streamed answer, how well drafting worked, a measurement's progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from forerun.core.outputs import StreamDelta
from forerun.core.stats import SpeculationStats
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


@contextmanager
def resumable(keeps: Callable[[], bool], *, without: str | None = None) -> Iterator[None]:
    """Tell whoever interrupts a command that it goes on when it is given again.

    Args:
        keeps: whether anything is kept by then; if not, nothing is told.
        without: an option that would begin anew.
    """
    try:
        yield
    except KeyboardInterrupt:
        if keeps():
            print(
                f"interrupted: the same command{f' without {without}' if without else ''} goes on from here",
                file=sys.stderr,
            )
        raise


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


def speculation_json(stats: SpeculationStats) -> dict[str, object]:
    """Counts and rates of speculation as JSON, in total and by drafter; a rate without data is null."""
    return {
        **_counts_json(stats),
        "by_drafter": {drafter: _counts_json(counts) for drafter, counts in stats.by_drafter.items()},
    }


def _counts_json(stats: SpeculationStats) -> dict[str, object]:
    return {
        "num_steps": stats.num_steps,
        "num_drafts": stats.num_drafts,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_length": stats.acceptance_length,
        "acceptance_per_position": stats.acceptance_per_position,
    }


def speculation_rows(stats: SpeculationStats) -> list[tuple[str, str]]:
    """Name and value of the figures that show how well drafting worked."""
    length = stats.acceptance_length
    per_position = " ".join(f"{share:.0%}" for share in stats.acceptance_per_position)
    return [
        ("acceptance rate (accepted / drafted)", _acceptance(stats)),
        ("acceptance length (tokens per step)", "-" if length is None else f"{length:.2f}"),
        ("acceptance per position", per_position or "-"),
        *((f"accepted from {drafter}", _share_of(counts)) for drafter, counts in stats.by_drafter.items()),
    ]


def _acceptance(stats: SpeculationStats) -> str:
    return "-" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.1%}"


def _share_of(stats: SpeculationStats) -> str:
    """The accepted tokens of one of several drafters."""
    tokens = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} tokens"
    return f"{tokens} in {stats.num_drafts} drafts ({_acceptance(stats)})"
