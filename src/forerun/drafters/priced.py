"""A drafter that computes, asked only for sequences where its drafts are worth the time that they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forerun.core.depth_rates import DepthRates
from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftRequest
from forerun.drafters.guard import GuardedDrafter

if TYPE_CHECKING:
    from torch import Tensor

HOPE = 0.8
"""The rate at which an unknown drafter's tokens are expected to stand: high, so that it is tried."""

PASS_ROWS = 16
"""A pass over a few rows takes as long as it would take for so many more: it reads all weights."""

PAID_OFF_OVER = 32
"""The drafts that share the price of what a sequence must catch up with before the first."""

SPEED_WEIGHT = 0.1  # of a call in the running time of a row
FORGOTTEN_AFTER = 256  # steps without a call: what was learnt of a drafter that was left out is then doubted
LONGEST_STEP = 1.0  # seconds; a longer time between two steps is no step


@dataclass(slots=True)
class _Pending:
    """A draft whose fate is not known yet, and the number of tokens before it."""

    draft: Draft
    start: int


class PricedDrafter:
    """Asks a drafter for those sequences, and as deep, as the expected tokens outweigh its time.

    The time is counted in tokens: what the engine writes in a second, measured here between calls. A
    draft says of each depth how often the text agreed with it there, whether it was verified or not: the
    text is the label. A sequence that the drafter has not read lately costs a share of the rows that it must catch
    up with, too.

    Args:
        name: what statistics call the drafter.
        guarded: the drafter, behind its guard.
        max_tokens: the deepest draft to ask for.
        clock: seconds.
    """

    def __init__(
        self,
        name: str,
        guarded: GuardedDrafter,
        *,
        max_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.guarded = guarded
        self.max_tokens = max_tokens
        self._clock = clock
        self._rates = DepthRates(prior_rate=HOPE)
        self._pending: dict[int, _Pending] = {}
        self._num_read: dict[int, int] = {}
        self._row_seconds = 0.0  # running; 0: not known
        self._tokens_per_second = 0.0
        self._last_call: float | None = None
        self._lengths: dict[int, int] = {}  # of the sequences at the last call
        self._num_steps_left_out = 0

    def start(self, sequence: Sequence) -> None:
        """Start a sequence in the drafter."""
        self.guarded.start(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Stop a sequence in the drafter."""
        for known in (self._pending, self._num_read, self._lengths):
            known.pop(sequence.seq_id, None)
        self.guarded.stop(sequence)

    def propose(
        self, requests: Listing[DraftRequest], free_tokens: Listing[float], features: Mapping[str, Tensor]
    ) -> list[Draft]:
        """Return a draft for each request, empty where its own expected tokens are not worth more than `free_tokens`.

        Args:
            requests: the sequences.
            free_tokens: the tokens that a draft which costs nothing is expected to bring to each.
            features: as in `DraftContext`.
        """
        self._note_step(requests)
        chosen, depth = self._worth_asking(requests, free_tokens)
        drafts = [NO_DRAFT] * len(requests)
        if not chosen:
            self._num_steps_left_out += 1
            if self._num_steps_left_out == FORGOTTEN_AFTER:
                self._rates = DepthRates(prior_rate=HOPE)
            return drafts
        self._num_steps_left_out = 0
        asked = [
            replace(
                requests[i], max_tokens=min(depth, requests[i].max_tokens), max_depth=min(depth, requests[i].max_depth)
            )
            for i in chosen
        ]
        num_rows = sum(self._num_rows(requests[i], depth) for i in chosen) + depth * PASS_ROWS
        started = self._clock()
        answers = self.guarded.propose(asked, features)
        self._note_time(self._clock() - started, num_rows)
        for i, answer in zip(chosen, answers, strict=True):
            self._num_read[requests[i].sequence.seq_id] = len(requests[i].sequence)
            if answer.token_ids:
                drafts[i] = self._adopt(answer, requests[i])
        return drafts

    def _adopt(self, answer: Draft, request: DraftRequest) -> Draft:
        draft = replace(answer, source=self.name)
        self._pending[request.sequence.seq_id] = _Pending(draft, len(request.sequence))
        return replace(draft, survival=self._rates.survival(draft)) if draft.survival is None else draft

    def _num_rows(self, request: DraftRequest, depth: int) -> int:
        """Rows that a draft for the sequence takes: those that it has to catch up with, and those of the draft."""
        return self._num_to_read(request) + depth

    def _num_to_read(self, request: DraftRequest) -> int:
        sequence = request.sequence
        return len(sequence) - self._num_read.get(sequence.seq_id, 0)

    def _worth_asking(self, requests: Listing[DraftRequest], free_tokens: Listing[float]) -> tuple[list[int], int]:
        """Which requests to ask for, and how deep: where the tokens gained, less the price of the time, are most."""
        price = self._row_seconds * self._tokens_per_second  # tokens that a row's time is worth
        best: tuple[float, list[int], int] = (0.0, [], 0)
        chances = self._rates.chances(self.name, self.max_tokens)
        expected = 0.0
        for depth in range(1, self.max_tokens + 1):
            expected += chances[depth]
            gains = [
                (expected - free - price * (depth + self._num_to_read(request) / PAID_OFF_OVER), i)
                for i, (request, free) in enumerate(zip(requests, free_tokens, strict=True))
            ]
            paying = [(gain, i) for gain, i in gains if gain > 0.0]
            worth = sum(gain for gain, _ in paying) - price * depth * PASS_ROWS
            if worth > best[0]:
                best = worth, [i for _, i in paying], depth
        return best[1], best[2]

    def _note_step(self, requests: Listing[DraftRequest]) -> None:
        """Learn how many tokens a second brings, and what became of earlier drafts."""
        now, last = self._clock(), self._last_call
        self._last_call = now
        num_tokens = 0
        for request in requests:
            sequence = request.sequence
            length = len(sequence)
            num_tokens += length - self._lengths.get(sequence.seq_id, length)
            self._lengths[sequence.seq_id] = length
            pending = self._pending.pop(sequence.seq_id, None)
            if pending is not None:
                self._label(pending, sequence)
        if last is not None and num_tokens and 0.0 < now - last < LONGEST_STEP:
            rate = num_tokens / (now - last)
            self._tokens_per_second += (rate - self._tokens_per_second) * (0.05 if self._tokens_per_second else 1.0)

    def _label(self, pending: _Pending, sequence: Sequence) -> None:
        """Follow the text down the draft; as far as neither has ended, its fate is not known."""
        draft, text = pending.draft, sequence.tokens_from(pending.start)
        children, node, num_stood = draft.children(), -1, 0
        for token_id in text:
            node = next((child for child in children[node + 1] if draft.token_ids[child] == token_id), -2)
            if node == -2:
                self._rates.observe(self.name, depth=draft.depth, num_stood=num_stood)
                return
            num_stood += 1
            if not children[node + 1]:
                break
        self._rates.observe(self.name, depth=num_stood, num_stood=num_stood)

    def _note_time(self, seconds: float, num_rows: int) -> None:
        if not 0.0 < seconds < LONGEST_STEP * 10:  # a clock that jumps
            return
        measured = seconds / num_rows
        self._row_seconds += (measured - self._row_seconds) * (SPEED_WEIGHT if self._row_seconds else 1.0)
