"""Reading of a stream: what one answer was, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from forerun.core.outputs import StreamDelta
from forerun.core.stats import SpeculationStats
from forerun.errors import RequestError

Show = Callable[[StreamDelta], None]


@dataclass(slots=True, kw_only=True)
class Answer:
    """One completion that was streamed."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    first_token_seconds: float | None = None  # from the request to the first token
    seconds: float = 0.0  # from the request to the last token

    @property
    def tokens_per_second(self) -> float:
        """Tokens written / time from request to end, the prompt's computation included."""
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


def read_answer(deltas: Iterator[StreamDelta], show: Show) -> Answer:
    """Read the stream of one completion to its end, showing each delta as it comes.

    Raises:
        RequestError: the request failed while it ran.
    """
    answer = Answer()
    start = time.perf_counter()
    for delta in deltas:
        answer.seconds = time.perf_counter() - start
        if delta.token_ids and answer.first_token_seconds is None:
            answer.first_token_seconds = answer.seconds
        answer.text += delta.text
        answer.token_ids += delta.token_ids
        answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
        show(delta)
    if answer.finish_reason == "error":
        raise RequestError(f"the request failed: {answer.stop_reason}")
    return answer


def speculation_json(stats: SpeculationStats) -> dict[str, object]:
    """Counts and rates of speculation for machines; a rate without data is null."""
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
    """Name and value of each number that tells how well drafting worked, for people."""
    rate, length = stats.acceptance_rate, stats.acceptance_length
    per_position = " ".join(f"{share:.0%}" for share in stats.acceptance_per_position)
    return [
        ("acceptance rate (accepted / drafted)", "-" if rate is None else f"{rate:.1%}"),
        ("acceptance length (tokens per step)", "-" if length is None else f"{length:.2f}"),
        ("acceptance per position", per_position or "-"),
    ]
