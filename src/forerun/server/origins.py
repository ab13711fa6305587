"""Where tokens came from: for each token its origin and its span of the text, for each request vLLM's counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from forerun.core.outputs import Origin, StreamDelta
from forerun.core.stats import SpeculationStats

Note = TypeVar("Note")


class TokenSpans(Generic[Note]):
    """Cuts the text of a stream at its tokens' borders, each span with what is known of its token.

    Text belongs to the token with which it became certain: a character of several tokens to the last of them.
    A delta's text may lag behind its tokens (half a stop string), so spans wait until their text is out.

    Args:
        push: returns the text that became certain with the next token, as `TextStream.push` does; called
            once for each token.
    """

    def __init__(self, push: Callable[[int], str]) -> None:
        self._push = push
        self._waiting: deque[tuple[str, Note]] = deque()
        self._last: Note | None = None  # of the last token

    def cut(self, text: str, tokens: Iterable[tuple[int, Note]]) -> list[tuple[str, Note]]:
        """Add a delta's tokens, (id, note) each, and cut its text; the spans join to `text` where there are tokens."""
        for token_id, note in tokens:
            self._last = note
            if span := self._push(token_id):
                self._waiting.append((span, note))
        spans = []
        while text and self._waiting:
            span, note = self._waiting.popleft()
            if len(span) > len(text):
                self._waiting.appendleft((span[len(text) :], note))
            spans.append((text[: len(span)], note))
            text = text[len(span) :]
        if text and self._last is not None:
            spans.append((text, self._last))
        return spans


class Origins:
    """The `forerun` object of one choice: its tokens' origins, and its text cut at their borders.

    `push` gives the text of each token, see `TokenSpans`.
    `origins` has one entry per token: accepted, recovered or bonus. `pieces` join to the choice's
    text; each names its token's origin, and for tokens of a step with a draft the drafter (of an accepted token its own, else that of
    the draft's first token) and the position (from 0) in or after the draft. `by_drafter` says how many tokens of the step's draft each drafter
    drafted, and how many of them were accepted. Text may lag behind tokens, and so do pieces.
    """

    def __init__(self, push: Callable[[int], str]) -> None:
        self._spans: TokenSpans[dict[str, Any]] = TokenSpans(push)

    def of(self, delta: StreamDelta) -> dict[str, Any]:
        """The `forerun` object of a chunk with this delta."""
        drafter = delta.drafter if delta.num_draft_tokens else None
        drafters = delta.token_drafters if drafter is not None else [None] * len(delta.origins)
        notes: list[dict[str, Any]] = [
            {"origin": origin.value, "drafter": of_token, "position": None if of_token is None else position}
            for position, (origin, of_token) in enumerate(zip(delta.origins, drafters, strict=True))
        ]
        accepted = [
            of_token for origin, of_token in zip(delta.origins, drafters, strict=True) if origin is Origin.ACCEPTED
        ]
        spans = self._spans.cut(delta.text, zip(delta.token_ids, notes, strict=True))
        return {
            "origins": [origin.value for origin in delta.origins],
            "drafter": drafter,
            "num_draft_tokens": delta.num_draft_tokens,
            "num_accepted_tokens": len(accepted),
            "by_drafter": {
                name: {"num_draft_tokens": count, "num_accepted_tokens": accepted.count(name)}
                for name, count in delta.num_drafted_by.items()
            },
            "pieces": [{"text": text, **note} for text, note in spans],
        }


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The `forerun` object of a whole choice, from those of its steps."""
    return {
        "origins": [origin for part in parts for origin in part["origins"]],
        "num_draft_tokens": sum(part["num_draft_tokens"] for part in parts),
        "num_accepted_tokens": sum(part["num_accepted_tokens"] for part in parts),
        "pieces": [piece for part in parts for piece in part["pieces"]],
    }


def speculation_metrics(
    stats: SpeculationStats, *, num_speculative_tokens: int, steps: Sequence[StreamDelta] | None
) -> dict[str, Any]:
    """vLLM's `metrics.speculative_decoding` of one completion; like its own, it counts steps with a draft.

    `by_drafter` is added to it: what each drafter has earned. `steps` adds the numbers of each such step
    ("detailed").
    """
    at_least = [stats.num_drafts, *stats.accepted_per_position]  # steps that accepted j tokens or more
    at_least += [0] * (num_speculative_tokens + 2 - len(at_least))
    counts: dict[str, Any] = {
        "mean_acceptance_length": 1 + stats.num_accepted_tokens / max(1, stats.num_drafts),
        "draft_acceptance_rate": stats.acceptance_rate or 0.0,
        "acceptance_histogram": [at_least[j] - at_least[j + 1] for j in range(num_speculative_tokens + 1)],
        "num_spec_steps": stats.num_drafts,
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": num_speculative_tokens,
        "by_drafter": {
            drafter: {
                "num_spec_steps": earned.num_drafts,
                "num_draft_tokens": earned.num_draft_tokens,
                "num_accepted_draft_tokens": earned.num_accepted_tokens,
            }
            for drafter, earned in sorted(stats.by_drafter.items())
        },
    }
    if steps is not None:
        drafted = [step for step in steps if step.num_draft_tokens]
        counts["per_step_accepted"] = [step.num_accepted_tokens for step in drafted]
        counts["per_step_drafted"] = [step.num_draft_tokens for step in drafted]
        counts["per_step_drafter"] = [step.drafter for step in drafted]
    return counts
