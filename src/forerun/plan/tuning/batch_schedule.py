"""K by batch size as one more candidate: of a way to draft that was simulated in several lengths, the best one for each batch size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forerun.plan.draft_lengths import StepSeconds, StepTable, as_schedule, steady_lengths, step_seconds_of_rows
from forerun.plan.profile import SCHEDULE
from forerun.plan.tuning.candidates import Candidate

CHOSEN_OTHERWISE = ("enable_adaptive_verification", SCHEDULE)
"""Settings with which the length of drafts is not one K."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingFigures:
    """What a simulated configuration drafted and gained, on average over the steps of its sequences."""

    tokens_per_step: float
    draft_tokens_per_step: float
    drafting_seconds_per_step: float


PLAIN_DRAFTING = DraftingFigures(tokens_per_step=1.0, draft_tokens_per_step=0.0, drafting_seconds_per_step=0.0)


def with_schedule(
    candidates: Sequence[Candidate],
    figures: Mapping[str, DraftingFigures],
    step_times: StepSeconds,
    *,
    max_batch_size: int,
    context: float,
) -> Candidate | None:
    """The best way to draft with one K, with a K for each batch size instead.

    Args:
        candidates: what was simulated, best first; all with the same limits.
        figures: of those that drafted, by name.
        step_times: what steps take.
        max_batch_size: the most sequences that the load runs at once.
        context: mean tokens that a running sequence has in the KV cache.

    Returns:
        None where the best is no drafter with one K or has only one length, or where one K is the best for all batch sizes.
    """
    best = next((one for one in candidates if not one.is_auto), None)
    if best is None or _family(best) is None or max_batch_size < 2:
        return None
    lengths = {0: PLAIN_DRAFTING} | {
        one.num_speculative_tokens: figures[one.name]
        for one in candidates
        if _family(one) == _family(best) and one.quantization == best.quantization and one.name in figures
    }
    if len(lengths) < 3:
        return None
    known = sorted(lengths)
    table = _table(step_times, [lengths[length] for length in known], max_batch_size, context)
    by_batch_size = np.array(known, dtype=np.int64)[steady_lengths(table)]
    schedule = as_schedule(by_batch_size)
    if len(schedule) == 1:
        return None
    config = dict(best.speculative_config or {}) | {
        "num_speculative_tokens": int(by_batch_size.max()),
        SCHEDULE: [list(entry) for entry in schedule],
    }
    return replace(best, name=f"{best.name}, K by batch size", speculative_config=config)


def _family(candidate: Candidate) -> str | None:
    """What a configuration has in common with those that differ by K alone; None where it has not one K."""
    config: Mapping[str, Any] = candidate.speculative_config or {}
    if candidate.is_auto or not candidate.num_speculative_tokens or any(config.get(name) for name in CHOSEN_OTHERWISE):
        return None
    return json.dumps(
        {name: value for name, value in config.items() if name != "num_speculative_tokens"}, sort_keys=True
    )


def _table(
    step_times: StepSeconds, lengths: Sequence[DraftingFigures], max_batch_size: int, context: float
) -> StepTable:
    """What steps take and yield at each batch size, for each of the lengths."""
    seconds = np.array(
        [
            [
                step_seconds_of_rows(step_times, size, size * (1.0 + one.draft_tokens_per_step), context)
                + size * one.drafting_seconds_per_step
                for one in lengths
            ]
            for size in range(1, max_batch_size + 1)
        ]
    )
    expected = np.array([one.tokens_per_step for one in lengths])
    return StepTable(seconds=seconds, expected=expected, variance=np.zeros(len(lengths)))
