"""A drafter that computes, asked only for sequences where what it adds to free drafts is worth the time that it takes."""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from forerun.core.draft import NO_DRAFT, SLACK, Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftRequest
from forerun.drafters.guard import GuardedDrafter
from forerun.drafters.margins import ChancesOfMargins, EarlyStop

if TYPE_CHECKING:
    from torch import Tensor

HOPE, HOPE_WEIGHT = 0.8, 4.0
"""The rate at which an unknown drafter's tokens are expected to stand where free ones do not, and as how many drafts that
counts: high, so that it is tried."""

DISCOUNT = 0.998
"""Weight of all earlier drafts with each new one, so that a change of the texts shows after a few hundred."""

FREE_TOKENS = (0.4, 0.8, 1.2, 2.0, 3.5)
"""Where one class of free drafts ends and the next begins, by the tokens that they are expected to bring."""

CHANCES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
"""Where one class of drafted tokens ends and the next begins, by their chances to stand."""

PASS_ROWS = 16
"""A pass over a few rows takes as long as it would take for so many more: it reads all weights."""

PAID_OFF_OVER = 32
"""The drafts that share the price of what a sequence must catch up with before the first."""

SPEED_WEIGHT = 0.1  # of a call in the running time of a row
NUM_LATEST = 3  # calls, whose median says what one takes now: a single one may have been interrupted
FORGOTTEN_AFTER = 256  # steps without a call: what was learnt of a drafter that was left out is then doubted,
TRIAL_SHARE = 0.01  # if the calls that it takes to learn anew last no more than this share of the time since the last
LONGEST_STEP = 60.0  # seconds; a longer time between two steps is no step


class Expected(NamedTuple):
    """What to expect of a chain down to one depth, and the chance that it is drafted so deep.

    `gain` are the tokens that it adds down to there, less what verifying them costs; `rows` those that are drafted.
    """

    gain: float
    drafted: float
    rows: float


class Guessed(NamedTuple):
    """A token of a chain, or a runner-up beside it: the chance that it was thought to have, and whether it has added a token."""

    chance: float
    has_added: bool


@dataclass(slots=True)
class _AtDepth:
    """What became of one depth of chains; tokens are counted by the class of their chance. The latest chain counts most."""

    num_asked: float = 0.0
    num_chains: float = 0.0  # that were drafted so deep
    drafted: list[float] = field(default_factory=lambda: [0.0] * (len(CHANCES) + 1))
    added: list[float] = field(default_factory=lambda: [0.0] * (len(CHANCES) + 1))

    def observe(self, guessed: Listing[Guessed]) -> None:
        """Count the tokens of one chain here; none where it ended before."""
        self.num_asked = self.num_asked * DISCOUNT + 1.0
        self.num_chains = self.num_chains * DISCOUNT + bool(guessed)
        self.drafted = [count * DISCOUNT for count in self.drafted]
        self.added = [count * DISCOUNT for count in self.added]
        for chance, has_added in guessed:
            of_chance = bisect(CHANCES, chance)
            self.drafted[of_chance] += 1.0
            self.added[of_chance] += has_added

    def gain(self, row_price: float, *, hope: float) -> float:
        """The tokens that a chain adds here beyond what their rows cost, where only those are verified that bring more than that."""
        nets = (added - row_price * drafted for added, drafted in zip(self.added, self.drafted, strict=True))
        hoped = max(0.0, hope - row_price) * HOPE_WEIGHT
        return (sum(net for net in nets if net > 0.0) + hoped) / (self.num_asked + HOPE_WEIGHT)


class AddedTokens:
    """How many tokens a chain adds to free drafts at each depth: how often it stands there where no free one does.

    Free drafts are told apart by the tokens that they are expected to bring: the more, the less a chain adds. A chain
    that ends before the depth that was asked for adds nothing behind its end, and takes no pass there. A row of the target's
    pass has its price, too, in tokens: what is less likely to add one is not verified, and neither costs nor brings anything.
    """

    def __init__(self, max_depth: int) -> None:
        self._depths = [[_AtDepth() for _ in range(max_depth)] for _ in range(len(FREE_TOKENS) + 1)]
        self._row_price = 0.0  # at which the next were found, and nothing has been learnt since
        self._expected: dict[int, list[Expected]] = {}

    def observe(self, free_tokens: float, chain: Listing[Listing[Guessed]], *, num_known: int) -> None:
        """Count a chain, by its tokens at each depth; its fate is known at the first `num_known` depths that were asked for."""
        self._expected.clear()
        of_class = self._depths[bisect(FREE_TOKENS, free_tokens)]
        for depth, at_depth in enumerate(of_class[:num_known]):
            at_depth.observe(chain[depth] if depth < len(chain) else ())

    def expected(self, free_tokens: float, row_price: float) -> list[Expected]:
        """What to expect down to each depth, where a row costs so many tokens."""
        if row_price != self._row_price:
            self._row_price = row_price
            self._expected.clear()
        of_class = bisect(FREE_TOKENS, free_tokens)
        found = self._expected.get(of_class)
        if found is None:
            found = self._expected[of_class] = list(self._expect(of_class, row_price))
        return found

    def _expect(self, of_class: int, row_price: float) -> Iterator[Expected]:
        hope, most, gain, rows = 1.0, 1.0, 0.0, 0.0
        for at_depth in self._depths[of_class]:
            hope *= HOPE
            most = min(most, at_depth.gain(row_price, hope=hope))  # no token adds more than the one before it
            gain += most
            drafted = (at_depth.num_chains + HOPE_WEIGHT) / (at_depth.num_asked + HOPE_WEIGHT)
            rows += drafted
            yield Expected(gain, drafted, rows)


@dataclass(slots=True)
class _Pending:
    """A chain whose fate is not known yet, the free draft in its place, and the number of tokens before both."""

    levels: list[list[int]]  # at each depth the chain's token, and then its runners-up
    margins: tuple[float, ...]  # of its tokens
    asked_depth: int
    free: Draft
    free_tokens: float
    start: int


class PricedDrafter:
    """Asks a drafter for those sequences, and as deep, as what it adds outweighs its time.

    The time is counted in tokens: what the engine writes in a second, measured here between calls. A
    chain says of each depth how often the text agreed with it there and not with the free draft, whether it was verified
    or not: the text is the label. A chain ends where it is no longer likely enough for another pass to pay: by its tokens'
    margins, of which the text tells what they mean. A sequence that the drafter has not read lately costs a share of the
    rows that it must catch up with, too. A drafter that is left out, as it was wrong or became slow, is tried again later:
    the longer its calls took, the later.

    Args:
        name: what statistics call the drafter.
        guarded: the drafter, behind its guard.
        max_depth: the deepest draft to ask for.
        num_runners_up: that it drafts beside each token.
        clock: seconds.
    """

    def __init__(
        self,
        name: str,
        guarded: GuardedDrafter,
        *,
        max_depth: int,
        num_runners_up: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = name
        self.guarded = guarded
        self.max_depth = max_depth
        self._tokens_per_level = 1 + num_runners_up
        self._clock = clock
        self._added = AddedTokens(max_depth)
        self._chances = ChancesOfMargins()
        self._knows_margins = num_runners_up > 0
        self._pending: dict[int, _Pending] = {}
        self._num_read: dict[int, int] = {}
        self._present: set[int] = set()  # of the last call
        self._row_seconds = 0.0  # running; 0: not known
        self._latest: deque[tuple[float, float]] = deque(maxlen=NUM_LATEST)  # of calls: seconds, and seconds of a row
        self._tokens_per_second = 0.0
        self._last_call: float | None = None
        self._running: dict[int, Sequence] = {}
        self._lengths: dict[int, int] = {}  # of these at the last call
        self._num_steps_left_out = 0
        self._seconds_left_out = 0.0

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Go by this clock from now on."""
        self._clock = clock

    def start(self, sequence: Sequence) -> None:
        """Start a sequence in the drafter."""
        self._running[sequence.seq_id], self._lengths[sequence.seq_id] = sequence, len(sequence)
        self.guarded.start(sequence)

    def stop(self, sequence: Sequence) -> None:
        """Stop a sequence in the drafter."""
        for known in (self._pending, self._num_read, self._running, self._lengths):
            known.pop(sequence.seq_id, None)
        self._present.discard(sequence.seq_id)
        self.guarded.stop(sequence)

    def propose(
        self, requests: Listing[DraftRequest], free: Listing[Draft], features: Mapping[str, Tensor]
    ) -> list[Draft]:
        """Return a chain for each request, empty where it is not expected to add what its time is worth.

        Args:
            requests: the sequences.
            free: drafts that cost nothing, which say how likely their nodes are.
            features: as in `DraftContext`.
        """
        self._note_step(requests)
        free_tokens = [sum(draft.survival or ()) for draft in free]
        chosen, depth = self._worth_asking(requests, free_tokens)
        self._present = {request.sequence.seq_id for request in requests}
        chains = [NO_DRAFT] * len(requests)
        if not chosen:
            self._num_steps_left_out += 1
            if self._may_try_again():
                self._forget()
            return chains
        self._num_steps_left_out, self._seconds_left_out = 0, 0.0
        pass_price = self._price() * (1 + PASS_ROWS / len(chosen))
        stop = EarlyStop(pass_price / self._chances.mean, self._chances.chances)
        asked = [self._as_deep_as(depth, requests[i], stop) for i in chosen]
        started = self._clock()
        answers = self.guarded.propose(asked, features)
        seconds = self._clock() - started
        num_rows, behind = self._note_read(asked, answers)
        deepest, knows_margins = 1, False
        for i, request, answer in zip(chosen, asked, answers, strict=True):
            sequence, levels = request.sequence, answer.first_path()
            if sequence.seq_id in behind:  # it was not drafted for
                continue
            num_rows += len(levels)
            deepest = max(deepest, len(levels))
            chains[i] = answer
            known = (answer.margins or ())[: len(levels)]  # a draft that was cut still has all of them
            margins = known + (math.nan,) * (len(levels) - len(known))
            knows_margins |= not all(map(math.isnan, margins))
            self._pending[sequence.seq_id] = _Pending(
                levels, margins, request.max_depth, free[i], free_tokens[i], len(sequence)
            )
        self._knows_margins = knows_margins
        self._note_time(seconds, num_rows + deepest * PASS_ROWS)
        return chains

    def _as_deep_as(self, depth: int, request: DraftRequest, stop: EarlyStop) -> DraftRequest:
        """A request for a chain that is at most so deep, with its runners-up."""
        depth = min(depth, request.max_depth, request.max_tokens)
        return DraftRequest(  # in half the time of `replace`
            request.sequence,
            depth * self._tokens_per_level,
            depth,
            request.num_computed,
            request.block_ids,
            request.rules,
            request.min_survival,
            stop,
        )

    def _may_try_again(self) -> bool:
        """Whether the drafter was left out for so long that trying it costs next to nothing."""
        latest = [seconds for seconds, _ in self._latest]
        trial = len(latest) * median_low(latest) if latest else 0.0
        return self._num_steps_left_out >= FORGOTTEN_AFTER and trial <= TRIAL_SHARE * self._seconds_left_out

    def _forget(self) -> None:
        """Take the drafter for unknown."""
        self._num_steps_left_out, self._seconds_left_out = 0, 0.0
        self._added, self._knows_margins = AddedTokens(self.max_depth), self._tokens_per_level > 1
        self._row_seconds = 0.0
        self._latest.clear()

    def _price(self) -> float:
        """The tokens that a row's time is worth."""
        return self._row_seconds * self._tokens_per_second

    def _num_to_read(self, request: DraftRequest) -> int:
        """The tokens that a sequence must catch up with.

        The drafter is asked of one that comes, as it may have read them for another one, and of one that comes back: where it
        was preempted, what had been read of it is lost.
        """
        sequence = request.sequence
        seq_id, length = sequence.seq_id, len(sequence)
        if seq_id not in self._present:
            num_unread = self.guarded.num_unread(request)
            if num_unread is not None:
                self._num_read[seq_id] = length - num_unread
        return length - self._num_read.setdefault(seq_id, 0)

    def _note_read(self, asked: Listing[DraftRequest], answers: Listing[Draft]) -> tuple[int, set[int]]:
        """Note how far the drafter has read; return how many tokens that took, and the sequences that it must still catch up with.

        None must where nothing was read at all: such a drafter does not draft.
        """
        num_rows, behind = 0, set()
        for request, answer in zip(asked, answers, strict=True):
            sequence = request.sequence
            seq_id, length = sequence.seq_id, len(sequence)
            num_unread = 0
            if not answer.token_ids:
                num_unread = self.guarded.num_unread(request) or 0
                if num_unread:
                    behind.add(seq_id)
            num_rows += max(0, length - num_unread - self._num_read[seq_id])
            self._num_read[seq_id] = length - num_unread
        return num_rows, behind if num_rows else set()

    def _worth_asking(self, requests: Listing[DraftRequest], free_tokens: Listing[float]) -> tuple[list[int], int]:
        """Which requests to ask for, and how deep: where the tokens gained, less the price of the time, are most.

        What verifying a row costs is the same for all requests of a step, and `min_survival` a share of it.
        Chains whose margins are known end by themselves, so that they are asked for as deep as they may be.
        """
        price, num_passes = self._price(), 0.0
        best: tuple[float, list[int], int] = (0.0, [], 0)
        row_price = requests[0].min_survival / SLACK
        expected = [self._added.expected(free, row_price) for free in free_tokens]
        to_read = [price * self._num_to_read(request) / PAID_OFF_OVER for request in requests]
        for depth in range(self.max_depth):
            num_passes += min(1.0, sum([of_sequence[depth].drafted for of_sequence in expected]))
            if self._knows_margins and depth + 1 < self.max_depth:
                continue
            worth, paying = -price * num_passes * PASS_ROWS, []
            for i, of_sequence in enumerate(expected):
                gain = of_sequence[depth].gain - price * of_sequence[depth].rows - to_read[i]
                if gain > 0.0:
                    worth += gain
                    paying.append(i)
            if worth > best[0]:
                best = worth, paying, depth + 1
        return best[1], best[2]

    def _note_step(self, requests: Listing[DraftRequest]) -> None:
        """Learn how many tokens a second brings, whoever is drafted for, and what became of earlier drafts."""
        now, last = self._clock(), self._last_call
        self._last_call = now
        num_tokens = 0
        for seq_id, sequence in self._running.items():
            length = len(sequence)
            num_tokens += length - self._lengths[seq_id]
            self._lengths[seq_id] = length
        for request in requests:
            pending = self._pending.pop(request.sequence.seq_id, None)
            if pending is not None:
                self._label(pending, request.sequence)
        if last is None or not 0.0 < now - last < LONGEST_STEP:  # a clock that jumps
            return
        self._seconds_left_out += now - last
        if num_tokens:
            rate = num_tokens / (now - last)
            self._tokens_per_second += (rate - self._tokens_per_second) * (0.05 if self._tokens_per_second else 1.0)

    def _label(self, pending: _Pending, sequence: Sequence) -> None:
        """Follow the text down the chain, to a runner-up where it leaves it, and down the free draft."""
        text = sequence.tokens_from(pending.start)
        free_stood = pending.free.num_stood(text)
        chain: list[list[Guessed]] = []
        chance, stands, num_known = 1.0, True, pending.asked_depth
        for depth, (level, margin) in enumerate(zip(pending.levels, pending.margins, strict=True)):
            if stands and depth == len(text):  # which says no more
                num_known = depth
                break
            may_add, before = stands and free_stood <= depth, chance
            chance *= self._chances.chance_of(margin)
            is_right = stands and text[depth] == level[0]
            if stands:
                self._chances.observe(margin, stood=is_right)
            chain.append([Guessed(chance, may_add and is_right)])
            if len(level) > 1:  # the first runner-up has about half of what the token leaves
                chain[-1].append(Guessed((before - chance) / 2.0, may_add and text[depth] in level[1:]))
            stands = is_right
        self._added.observe(pending.free_tokens, chain, num_known=num_known)

    def _note_time(self, seconds: float, num_rows: int) -> None:
        """Learn from a call; the first alone says nothing, since it may have set things up."""
        if not 0.0 < seconds < LONGEST_STEP:  # a clock that jumps
            return
        self._latest.append((seconds, seconds / num_rows))
        if len(self._latest) == 1:
            return
        measured = median_low(of_row for _, of_row in self._latest)
        is_known = self._row_seconds and len(self._latest) == NUM_LATEST
        self._row_seconds += (measured - self._row_seconds) * (SPEED_WEIGHT if is_known else 1.0)
