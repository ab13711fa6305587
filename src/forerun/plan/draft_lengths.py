"""How many tokens to draft at each batch size: by enumeration over what a step costs and what it yields.

A step of B sequences with K drafted tokens each takes T(B, K) seconds, B (K + 1) rows verified and K drafted, and
yields E(K) tokens per sequence. K counts a draft's nodes, as the engine does: a tree has more of them than it is deep.
For a batch size the K with the least T / E is best for latency and throughput alike. T has steps where register tiles
fill up, so all K are tried; no rule that stops at the first loss would find the best.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from forerun.engine.speculation import Schedule
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.step_times import FREE_DRAFTING, DraftingCost

Floats = npt.NDArray[np.float64]
Lengths = npt.NDArray[np.int64]

MIN_GAIN = 0.03
"""A schedule changes K from one batch size to the next only if that makes a token at least so much cheaper."""


class StepSeconds(Protocol):
    """What a step takes; `StepTimeModel` is one."""

    def seconds(
        self,
        *,
        num_rows: int,
        num_sequences: int,
        num_context_tokens: int,
        num_prompt_rows: int = 0,
        num_prompt_context: int = 0,
    ) -> float:
        """Seconds of a step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftYield:
    """What a step brings and verifies with drafts of at most so many nodes: means over all steps that ask for one."""

    num_tokens: float  # the target's own included
    variance: float  # of that number
    num_nodes: float  # of the draft: rows beside the sequence's own


NO_DRAFT = DraftYield(num_tokens=1.0, variance=0.0, num_nodes=0.0)


def chain_yields(acceptance: AcceptanceProfile, longest: int) -> tuple[DraftYield, ...]:
    """Those of chains of 1 to `longest` tokens."""
    return tuple(
        DraftYield(
            num_tokens=acceptance.expected(length),
            variance=acceptance.variance(length),
            num_nodes=acceptance.mean_draft_tokens(length),
        )
        for length in range(1, longest + 1)
    )


def whole_yield(acceptance: AcceptanceProfile) -> DraftYield:
    """That of the drafts over which acceptance was counted."""
    (*_, deepest) = chain_yields(acceptance, acceptance.num_places)
    return deepest if acceptance.mean_nodes is None else replace(deepest, num_nodes=acceptance.mean_nodes)


def level_yields(acceptance: AcceptanceProfile) -> tuple[DraftYield, ...]:
    """Those of trees of which 1, 2, ... levels are verified, with as many nodes on each level: where only whole trees were counted."""
    deepest = max((place for place, rate in enumerate(acceptance.conditional, 1) if rate > 0.0), default=1)
    levels = chain_yields(acceptance, deepest)
    per_level = whole_yield(acceptance).num_nodes / len(levels)
    return tuple(replace(one, num_nodes=per_level * number) for number, one in enumerate(levels, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A way to draft that may be planned: what it yields and what it costs.

    Attributes:
        yields: of drafts of at most 1, 2, ... nodes; never empty.
        speculative_config: what users write for it.
        is_adaptive: the engine chooses the lengths of drafts while it runs.
        is_whole: yields are known of whole drafts alone, and a length of 1 stands for these.
        whole_nodes: the most nodes of a whole draft; None: not known, so that no schedule can name them.
        request_cv: how far requests differ in steps per token, deviation over mean, beyond the luck of single drafts.
        step_times: its own, drafting included, where it was measured as a whole, as at a server; None: those of the engine.
        num_blocks: KV blocks that an engine has beside the drafter; None: those that it has without one.
    """

    name: str
    acceptance: AcceptanceProfile
    yields: tuple[DraftYield, ...]
    cost: DraftingCost = FREE_DRAFTING
    speculative_config: dict[str, Any] = field(default_factory=dict)
    is_adaptive: bool = False
    is_whole: bool = False
    whole_nodes: int | None = None
    request_cv: float = 0.0
    step_times: StepSeconds | None = None
    num_blocks: int | None = None

    @property
    def max_draft_tokens(self) -> int:
        """The longest draft that may be planned."""
        return len(self.yields)

    @property
    def most_nodes(self) -> int:
        """Of a draft: the places that a sequence needs in the KV cache beside its own."""
        return max(map(self.nodes_of, range(1, self.max_draft_tokens + 1)))

    def nodes_of(self, length: int) -> int:
        """Of a draft of a length, where a length of 1 may stand for a whole one; 0: none."""
        return max(length, math.ceil(self.yields[length - 1].num_nodes)) if length else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """What a step takes and yields at each batch size from 1 and each draft length from 0."""

    seconds: Floats  # [batch sizes, draft lengths]
    expected: Floats  # [draft lengths], tokens per sequence
    variance: Floats  # [draft lengths]

    @property
    def seconds_per_token(self) -> Floats:
        """Mean seconds from one token of a sequence to its next, [batch sizes, draft lengths]."""
        return self.seconds / self.expected


def step_table(
    step_times: StepSeconds, speculation: Speculation | None, *, max_batch_size: int, context: float
) -> StepTable:
    """What steps of 1 to `max_batch_size` sequences take, each with `context` tokens in the KV cache.

    Without speculation the table has one draft length, 0; so has one whose drafts are never accepted, in effect,
    since K = 0 costs the same there: a drafter is not asked for nothing.
    """
    if speculation is not None and speculation.step_times is not None:
        step_times = speculation.step_times
    yields = [NO_DRAFT, *(speculation.yields if speculation else ())]
    # a look-up does not always find a draft of K tokens: rows are verified and paid for as far as there are any
    drafted = np.array([one.num_nodes for one in yields])
    seconds = np.empty((max_batch_size, len(yields)))
    for batch_size in range(1, max_batch_size + 1):
        for length, num_nodes in enumerate(drafted.tolist()):
            seconds[batch_size - 1, length] = step_seconds_of_rows(
                step_times, batch_size, batch_size * (1.0 + num_nodes), context
            )
    if speculation is not None:
        cost, sizes = speculation.cost, np.arange(1, max_batch_size + 1)[:, None]
        per_sequence = cost.seconds_per_sequence + cost.seconds_per_draft_token * drafted[1:]
        seconds[:, 1:] += cost.seconds_per_step + sizes * per_sequence
    return StepTable(
        seconds=seconds,
        expected=np.array([one.num_tokens for one in yields]),
        variance=np.array([one.variance for one in yields]),
    )


def step_seconds_of_rows(step_times: StepSeconds, batch_size: int, num_rows: float, context: float) -> float:
    """Seconds of a step of a mean number of rows, between those of the whole numbers beside it."""
    low, context_tokens = math.floor(num_rows), round(batch_size * context)
    counts = (low, low + 1) if num_rows > low else (low,)
    times = [
        step_times.seconds(num_rows=count, num_sequences=batch_size, num_context_tokens=context_tokens)
        for count in counts
    ]
    return times[0] + (num_rows - low) * (times[-1] - times[0])


def best_lengths(table: StepTable, *, max_length: int | None = None) -> Lengths:
    """The K with the cheapest token at each batch size; of equal ones the smallest."""
    last = None if max_length is None else max_length + 1
    best: Lengths = np.argmin(table.seconds_per_token[:, :last], axis=1)
    return best


def steady_lengths(table: StepTable, *, max_length: int | None = None, min_gain: float = MIN_GAIN) -> Lengths:
    """The same, but K changes from one batch size to the next only where that gains at least `min_gain`."""
    lengths = best_lengths(table, max_length=max_length)
    costs = table.seconds_per_token
    for at in range(1, len(lengths)):
        before = lengths[at - 1]
        if costs[at, lengths[at]] > (1.0 - min_gain) * costs[at, before]:
            lengths[at] = before
    return lengths


def as_schedule(lengths: Lengths) -> Schedule:
    """K by batch size as (first, last, K), in the form of `num_speculative_tokens_per_batch_size`."""
    starts = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist()]
    ends = [*starts[1:], len(lengths)]
    return tuple((start + 1, end, int(lengths[start])) for start, end in zip(starts, ends, strict=True))


def fixed_lengths(batch_sizes: int, length: int) -> Lengths:
    """The same K at every batch size."""
    return np.full(batch_sizes, length, dtype=np.int64)
