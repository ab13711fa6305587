"""Drafts as long as they pay: of all drafted nodes of a step, those are verified that raise tokens per second most."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from forerun.core.depth_rates import DepthRates
from forerun.core.draft import SLACK, Draft
from forerun.core.stats import SpeculationStats
from forerun.core.step import UNKNOWN_TOKEN, LateDraft, StepRecord
from forerun.engine.costs import MOST_CHANGE, StepCosts
from forerun.engine.regret import ChoiceAccount

SURE_GAIN = 0.98
"""A row that must bring more tokens than this is not worth drafting for: nothing is that sure to stand."""

LEAST_SURVIVAL = 0.01

MOST_SHARING = 64
"""Rows that may share the price of a jump of the costs."""

AVERAGED_OVER = 64  # steps, in the running gain of drafting
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024  # steps without drafting after it did not pay

TRIED_EVERY = 16  # steps: how often more or fewer rows are verified than seem best, where their cost is not known yet

INTERRUPTED = math.exp(MOST_CHANGE)
"""A step that takes so many times what it should has been interrupted, or the clock has jumped: that is held against no draft."""

MOST_LOST, LOST_SHARE = 0.3, 0.03
"""What drafts may cost a sequence beyond what they have brought it, before it gets no more: so many tokens, and this share of its
tokens so far. Together that is 5 % of a text of 15 tokens, and less of a longer one."""

PRICE_WEIGHT = 0.1  # of a step in the running price of a row

COMPARED_EVERY = 8  # steps, as the comparison takes longer than the choice


@dataclass(slots=True)
class _Pause:
    """When drafting is left out, as it costs more than it brings: for longer each time that it did not help."""

    gain: float = 0.0  # seconds saved by a step with drafting, discounted mean
    num_steps: int = 0  # that the mean is over
    length: int = FIRST_PAUSE
    num_left: int = 0

    def note_gain(self, seconds: float, *, plain_seconds: float) -> None:
        """A step with drafting has saved so many seconds, or wasted them."""
        self.num_steps += 1
        self.gain += (seconds - self.gain) * max(1.0 / self.num_steps, 1.0 / AVERAGED_OVER)
        if self.num_steps < AVERAGED_OVER:
            return
        if self.gain >= 0.0:
            self.length = FIRST_PAUSE
        elif self.gain < -0.005 * plain_seconds:
            self.num_left, self.length = self.length, min(2 * self.length, LONGEST_PAUSE)
            self.gain, self.num_steps = 0.0, 0


@dataclass(slots=True)
class _Prices:
    """What drafts cost one sequence beside others, in tokens that it would have written in the time without them; 0 where not known."""

    row: float = 0.0  # of a verified node, running mean
    draft: float = 0.0

    def note(self, seconds: float, *, num_rows: int, drafting: float, token_seconds: float) -> None:
        """A step has verified nodes in so many rows, which took so long beyond a plain one's time; a draft takes `drafting`."""
        self.draft = drafting / token_seconds
        if num_rows:
            row = seconds / num_rows / token_seconds
            self.row += (row - self.row) * (PRICE_WEIGHT if self.row else 1.0)

    def of_drafts(self, num_drafts: int, num_nodes: int) -> float:
        """What so many drafts cost, of so many nodes together."""
        return self.draft * num_drafts + self.row * num_nodes

    def lost_to(self, sequence: SpeculationStats, verifying: Draft) -> float:
        """The tokens that a sequence's drafts have cost it beyond those that stood; one that is verified now gains none."""
        lost = self.of_drafts(sequence.num_drafts, sequence.num_draft_tokens) - sequence.num_accepted_tokens
        cost = self.of_drafts(bool(verifying.token_ids), len(verifying))
        return lost + max(0.0, cost - sum(verifying.survival or ()))


class _Undrafted(NamedTuple):
    """A step without its drafts; what its prompts cost is taken off `beside`, as they are read whatever is drafted."""

    num_rows: int
    num_sequences: int
    beside: float  # cost that does not depend on the rows


class AdaptiveLength:
    """Chooses the verified part of each draft, under one budget of rows for the whole batch.

    A step with n drafted rows gives (sequences + the sum of the n best chances) tokens and costs what
    `costs` says, but for the prompts that it reads beside them: whatever is drafted, they are read, and a
    token is worth the time that it takes elsewhere. n is where tokens over cost is highest (a greedy choice:
    TETRIS, arXiv 2502.15197, shows that taking the likeliest nodes is best for a given n). Chances come from
    the drafters, or from the fate of their drafts so far. Drafting itself is paid for, too: where it wastes
    time it pauses. And what pays in the mean may fail for one sequence, so that none is drafted for that has
    lost more by drafts than a small share of its time.

    Args:
        num_speculative_tokens: the most nodes of any draft.
        costs: what a step costs; it is fitted while the engine runs.
        on_fit: called with the costs now and then, to keep them for the next engine.
        most_rows: of a step with drafts, beyond which a step is computed otherwise and takes many times as long: the largest
            CUDA graph's. None: there is no such number.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        *,
        costs: StepCosts | None = None,
        on_fit: Callable[[StepCosts], None] | None = None,
        most_rows: int | None = None,
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.costs = StepCosts() if costs is None else costs
        self._on_fit = on_fit
        self._most_rows = most_rows
        self._rates = DepthRates()
        self._pause = _Pause()
        self._prices = _Prices()  # in the step that is planned
        self._all_prices: defaultdict[int, _Prices] = defaultdict(_Prices)  # by the size of steps, see `_prices_beside`
        self._account = ChoiceAccount()
        self._last_price: float | None = None  # of one more row, in tokens, in the step that is planned
        self._price = 0.0  # about that of the next step
        self._limit = 0  # of drafts in the step that is planned, a pause left out
        self._context = 0.0  # tokens of a sequence in the KV cache, at the last step without prompts
        self._num_choices = 0
        self._next_trial = TRIED_EVERY
        self._draft_seconds = 0.0  # of a sequence's draft, running mean
        self._next_saved = 256  # steps

    @property
    def min_survival(self) -> float:
        """The least chance of a node that is worth drafting for the next step."""
        return min(max(SLACK * self._price, LEAST_SURVIVAL), 0.9)

    def draft_limit(self, batch_size: int) -> int:
        """All that may be verified; nothing in a pause, or where no row can pay."""
        costs, num_context_tokens = self.costs, round(batch_size * self._context)
        plain = costs.of_rows(batch_size) + costs.beside_rows(batch_size, num_context_tokens)
        least_price = batch_size / plain * self._cheapest_row(batch_size)
        self._price, self._last_price = self._last_price or least_price, None
        self._prices = self._prices_beside(batch_size)
        may_pay = least_price < SURE_GAIN or self._is_unknown(batch_size + _more(batch_size), batch_size)
        self._limit = self.num_speculative_tokens if may_pay else 0
        return 0 if self._pause.num_left else self._limit

    def limit_of(
        self, sequence: SpeculationStats, limit: int, *, verifying: Draft, has_prediction: bool = False
    ) -> int:
        """`limit`, or nothing where drafts have cost the sequence too much: short texts have no time to make up for it.

        A pause is none for a text that comes with a prediction, whatever has been drafted in vain for others.
        """
        if has_prediction:
            limit = self._limit
        if not limit:
            return 0
        num_tokens = sequence.num_steps + sequence.num_accepted_tokens
        lost = self._prices.lost_to(sequence, verifying)
        return limit if lost <= MOST_LOST + LOST_SHARE * num_tokens else 0

    def limit_of_forced(self, limit: int) -> int:  # noqa: ARG002 - the signature is that of all controls
        """All that may be verified, in a pause and for a sequence that gets no drafts, too: such tokens are nearly certain."""
        return self._limit

    def _is_unknown(self, num_rows: int, num_sequences: int) -> bool:
        """Whether it is time to find out what so many rows cost."""
        return self.costs.num_steps >= self._next_trial and not self.costs.knows(num_rows, num_sequences)

    def _to_try(self, best: int, num_drafted: int, step: _Undrafted) -> int:
        """The number of nodes to verify: `best`, or now and then none, or some more, where nobody knows what that costs.

        Beside prompts it is not tried, as such a step teaches nothing.
        """
        if step.num_rows > step.num_sequences:
            return best
        more = min(best + _more(step.num_sequences), num_drafted)
        for tried in (0, more):
            if tried != best and self._is_unknown(step.num_rows + tried, step.num_sequences):
                self._next_trial = self.costs.num_steps + TRIED_EVERY
                return tried
        return best

    def choose(
        self, drafts: Sequence[Draft], *, num_rows: int, num_sequences: int, num_context_tokens: int
    ) -> list[int]:
        """How many nodes of each draft are verified; see `SpeculationControl`."""
        if not any(draft.token_ids for draft in drafts):
            return [0] * len(drafts)
        chances = [self._survival(draft) for draft in drafts]
        of_prompts = self.costs.of_rows(num_rows) - self.costs.of_rows(num_sequences)
        beside = self.costs.beside_rows(num_sequences, num_context_tokens) - of_prompts
        step = _Undrafted(num_rows, num_sequences, beside)
        ranked = sorted(chain.from_iterable(chances), reverse=True)
        if self._most_rows is not None and num_rows <= self._most_rows:
            del ranked[self._most_rows - num_rows :]
            if not ranked:
                return [0] * len(drafts)
        best, rate = self._most_for_its_cost(ranked, step)
        self._last_price = self._row_price(rate, num_rows + best, num_drafted=best)
        best = self._to_try(best, len(ranked), step)
        lengths = _lengths(chances, ranked[:best])
        self._note_choice(chances, lengths, step)
        return lengths

    def _most_for_its_cost(self, ranked: Sequence[float], step: _Undrafted) -> tuple[int, float]:
        """How many nodes to verify, the likeliest first, and the tokens for the cost of such a step.

        Plain Python: after a pass over the weights NumPy's own code comes from memory.
        """
        costs = self.costs.between(step.num_rows, step.num_rows + len(ranked) + 1)
        beside = step.beside + self._draft_cost(step.num_sequences)
        tokens = float(step.num_sequences)
        best, best_rate = 0, tokens / (costs[0] + beside)
        for number, chance in enumerate(ranked, 1):
            tokens += chance
            rate = tokens / (costs[number] + beside)
            if rate > best_rate:
                best, best_rate = number, rate
        return best, best_rate

    def _row_price(self, rate: float, num_rows: int, *, num_drafted: int) -> float:
        """The tokens that one more row has to bring: before a jump of the costs that of the last row, as the next one alone is dear."""
        if not num_drafted:
            return rate * self._cheapest_row(num_rows)
        of_rows = self.costs.of_rows
        return rate * min(of_rows(num_rows + 1) - of_rows(num_rows), of_rows(num_rows) - of_rows(num_rows - 1))

    def _cheapest_row(self, num_rows: int) -> float:
        """What a drafted row costs at least beside so many, be it one of several: those behind a jump of the costs share it."""
        most = min(MOST_SHARING, num_rows * self.num_speculative_tokens)
        return self.costs.cheapest_after(num_rows, most) if most else math.inf

    def _survival(self, draft: Draft) -> tuple[float, ...]:
        if draft.survival is not None or not draft.token_ids:
            return draft.survival or ()
        return self._rates.survival(draft)

    def _draft_cost(self, num_sequences: int) -> float:
        return num_sequences * self._draft_seconds / self.costs.unit if self.costs.unit else 0.0

    def observe(self, record: StepRecord) -> None:
        """Learn the costs of steps and of drafting, and the fate of drafts that did not say their chances."""
        num_drafted, num_accepted = self._learn_fates(record)
        num_sequences, seconds = len(record.verified), record.times.spent
        if not num_sequences or not 0.0 < seconds < math.inf:  # a clock that jumps
            return
        self._pause.num_left = max(0, self._pause.num_left - 1)
        if record.num_rows == num_sequences + num_drafted:  # no prompts were read
            self._learn_costs(record, seconds)
        if self.costs.unit:
            self._judge(record, seconds, num_drafted=num_drafted, num_accepted=num_accepted)

    def _learn_fates(self, record: StepRecord) -> tuple[int, int]:
        """Learn what became of a step's drafts; how many nodes were verified, and how many of them stood."""
        num_drafted = num_accepted = 0
        for draft, stood in record.verified:
            if draft.token_ids:
                num_drafted += len(draft.token_ids)
                num_accepted += len(stood)
                self._account.note_fate(self._survival(draft), stood)
                if draft.survival is None and draft.token_ids[0] != UNKNOWN_TOKEN:
                    self._rates.observe(draft.source, depth=draft.depth, num_stood=len(stood))
        for late in record.late:
            self._learn_late(late)
        return num_drafted, num_accepted

    def _learn_costs(self, record: StepRecord, seconds: float) -> None:
        """Learn what a step without prompts costs, and keep what is known now and then."""
        costs, num_sequences = self.costs, len(record.verified)
        self._context = record.num_context_tokens / num_sequences
        costs.observe(
            num_rows=record.num_rows,
            num_sequences=num_sequences,
            num_context_tokens=record.num_context_tokens,
            seconds=seconds,
        )
        if self._on_fit is not None and costs.num_steps >= self._next_saved:
            self._next_saved = 4 * costs.num_steps
            self._on_fit(costs)

    def _judge(self, record: StepRecord, seconds: float, *, num_drafted: int, num_accepted: int) -> None:
        """Note what a step's drafts cost and brought: beside prompts, too, which are read whatever is drafted."""
        costs, num_sequences, num_undrafted = self.costs, len(record.verified), record.num_rows - num_drafted
        beside = costs.beside_rows(num_sequences, record.num_context_tokens)
        plain = (costs.of_rows(num_sequences) + beside) * costs.unit
        verifying = (costs.of_rows(record.num_rows) - costs.of_rows(num_undrafted)) * costs.unit
        drafting = self._note_drafting(record.times.draft, record.num_asked)
        self._prices_beside(num_sequences).note(
            verifying, num_rows=num_drafted, drafting=self._draft_seconds, token_seconds=plain / num_sequences
        )
        if record.num_asked:
            brought = num_accepted / num_sequences * plain
            self._pause.note_gain(brought - verifying - drafting, plain_seconds=plain)
        if num_undrafted == num_sequences:  # no prompts were read
            believed = min(seconds, INTERRUPTED * (plain + verifying))
            self._account.note_step(num_sequences + num_accepted, believed + drafting, plain=plain / num_sequences)

    def _prices_beside(self, num_sequences: int) -> _Prices:
        """What drafts cost in steps of about so many sequences: the more there are, the fewer nodes cost next to nothing."""
        return self._all_prices[num_sequences.bit_length()]

    def _learn_late(self, late: LateDraft) -> None:
        """Learn how deep drafts stand that are chosen before they are known: one that was not made stands nowhere."""
        if not late.limit:  # nobody was asked
            return
        num_stood = late.draft.num_stood(late.token_ids)
        num_known = num_stood + (num_stood < len(late.token_ids))
        self._rates.observe(None, depth=min(num_known, late.limit), num_stood=num_stood)

    def _note_drafting(self, seconds: float, num_asked: int) -> float:
        """Learn what drafting for so many sequences takes; return the seconds, as far as they are believed.

        One call says little: it may have been interrupted, or the clock has jumped. So it counts as no more than a
        plain step for each sequence, or twice what it took up to now.
        """
        if not num_asked or not seconds > 0.0:
            return 0.0
        of_one = min(seconds / num_asked, max(self.costs.unit, 2.0 * self._draft_seconds))
        self._draft_seconds += 0.05 * (of_one - self._draft_seconds)
        return of_one * num_asked

    def _note_choice(self, chances: Sequence[Sequence[float]], lengths: Sequence[int], step: _Undrafted) -> None:
        """Now and then, keep what was chosen and what fixed lengths would have chosen."""
        self._num_choices += 1
        if self._num_choices % COMPARED_EVERY:
            return
        self._account.note_choice(
            chances,
            lengths,
            cost_with=lambda num_drafted: self.costs.of_rows(step.num_rows + num_drafted) + step.beside,
            drafting=self._draft_cost(step.num_sequences),
        )

    def choices(self) -> ChoiceAccount:
        """See `SpeculationControl`."""
        return self._account.copy()


def _lengths(chances: Sequence[Sequence[float]], chosen: Sequence[float]) -> list[int]:
    """How many nodes of each draft are among the `chosen` best; of equal ones those of the first draft."""
    if not chosen:
        return [0] * len(chances)
    least = chosen[-1]
    num_least = chosen.count(least)
    lengths = []
    for of_draft in chances:
        length = 0
        for chance in of_draft:
            if chance <= least:
                if chance < least or not num_least:
                    break
                num_least -= 1
            length += 1
        lengths.append(length)
    return lengths


def _more(num_sequences: int) -> int:
    """The rows of a trial beyond those that seem to pay: enough to see their cost, too few to hurt."""
    return max(4, num_sequences // 2)
