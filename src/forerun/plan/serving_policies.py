"""What may be planned for one engine: its measured model, and the ways to run it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from forerun.engine.speculation import Schedule
from forerun.errors import ConfigError
from forerun.plan.draft_lengths import (
    Lengths,
    Speculation,
    StepSeconds,
    StepTable,
    as_schedule,
    best_lengths,
    fixed_lengths,
    steady_lengths,
    step_table,
)
from forerun.plan.lengths import prompt_lengths
from forerun.plan.load import Load

Floats = npt.NDArray[np.float64]

KV_CONFIDENCE = 0.99
"""Share of moments in which the KV of all running sequences fits, so that nobody is preempted."""


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """What was measured of one engine: step times, and the limits within which they hold.

    `has_plain_steps`: they hold without drafts, so that an engine may be planned to draft nothing.
    """

    step_times: StepSeconds
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    has_plain_steps: bool = True

    def prompt_seconds(self, num_tokens: float, *, cached: float = 0.0) -> float:
        """What a prompt's rows add to the steps that compute them, in chunks of the token budget."""
        if (num_tokens, cached) not in self._prompt_seconds:
            self._prompt_seconds[num_tokens, cached] = self._seconds_of_prompt(num_tokens, cached)
        return self._prompt_seconds[num_tokens, cached]

    def seconds_of_prompts(self, load: Load) -> Floats:
        """The same of a load's equally likely prompts, of which the prefix cache has the beginning."""
        cached = load.isl - load.computed_isl
        return np.array([self.prompt_seconds(cached + one, cached=cached) for one in prompt_lengths(load).tolist()])

    @cached_property
    def _prompt_seconds(self) -> dict[tuple[float, float], float]:
        return {}

    def _seconds_of_prompt(self, num_tokens: float, cached: float) -> float:
        empty = self.step_times.seconds(num_rows=0, num_sequences=0, num_context_tokens=0)
        seconds, start, end = 0.0, cached, num_tokens
        while end - start > 0.5:
            chunk = min(end - start, float(self.max_num_batched_tokens))
            rows = max(1, round(chunk))
            seconds += self.step_times.seconds(
                num_rows=0,
                num_sequences=0,
                num_context_tokens=0,
                num_prompt_rows=rows,
                num_prompt_context=round(start),
            )
            seconds -= empty
            start += chunk
        return seconds

    def shared_blocks(self, load: Load) -> int:
        """Blocks of a load's cached prompt tokens, where these are one beginning that all prompts share.

        An engine holds it once, whoever runs; its last block, where it is not full, each sequence has for itself.
        """
        return int(load.isl * load.prefix_hit_rate) // self.block_size

    def num_places(self, load: Load, num_draft_tokens: int) -> int:
        """Sequences of a load whose KV, drafts included, fits at once in 99 of 100 moments.

        A running sequence holds its prompt and what it has written so far: on average (1 + cv²) / 2 of an answer, since long
        answers run longer. The scheduler keeps one block free for each. What all prompts share is held once.

        1 where a sequence fits only alone, without room for drafts, which are shorter then; 0 where not even one fits.
        """
        shared = self.shared_blocks(load)
        free = self.num_blocks - shared
        if free <= 0:
            return 0
        spread = 1.0 + load.osl_cv**2
        written = load.osl * spread / 2.0
        written_squared = spread * (1.0 + 2.0 * load.osl_cv**2) / 3.0  # of gamma-distributed answers, E[L³] / 3 E[L]
        variance = load.osl**2 * (written_squared - spread**2 / 4.0) + (load.isl * load.isl_cv) ** 2
        own = load.isl - shared * self.block_size
        blocks = (own + written + num_draft_tokens + 1) / self.block_size + 1.5
        deviation = math.sqrt(variance) / self.block_size * NormalDist().inv_cdf(KV_CONFIDENCE)
        root = (-deviation + math.sqrt(deviation**2 + 4.0 * blocks * free)) / (2.0 * blocks)
        whole = math.ceil((load.isl + load.osl) / self.block_size)  # of one alone, at its end
        return max(int(root**2), int(whole <= self.num_blocks))

    def beside(self, speculation: Speculation | None) -> EngineModel:
        """The same engine with a drafter, for which it may have fewer KV blocks; no sequence is longer than all of them hold."""
        num_blocks = None if speculation is None else speculation.num_blocks
        if num_blocks is None or num_blocks == self.num_blocks:
            return self
        longest = min(self.max_model_len, num_blocks * self.block_size)
        return replace(self, num_blocks=num_blocks, max_model_len=longest)

    def places_beside(self, load: Load, speculation: Speculation | None) -> int:
        """Sequences of a load that fit at once with a drafter and its drafts, see `num_places`.

        Raises:
            ConfigError: not one does.
        """
        own, num_tokens = self.beside(speculation), load.isl + load.osl
        places = own.num_places(load, speculation.most_nodes if speculation else 0)
        if places and num_tokens <= own.max_model_len:
            return places
        beside, others = "", ""
        if speculation is not None and own is not self:
            beside, others = (
                f" that are left beside the drafter of {speculation.name}",
                ", or plan others with --method",
            )
        raise ConfigError(
            f"load: one sequence of {num_tokens:g} tokens needs more than the profile's {own.num_blocks} blocks "
            f"of {self.block_size} tokens{beside}; give the engine more KV memory and profile again{others}"
        )


@dataclass(frozen=True, kw_only=True)
class ServingPolicy:
    """How an engine is run: what it drafts at each batch size, and how many sequences it runs at once."""

    speculation: Speculation | None
    lengths: Lengths = field(repr=False)  # K at each batch size from 1
    max_num_seqs: int
    table: StepTable = field(repr=False)

    @cached_property
    def _at(self) -> tuple[npt.NDArray[np.int64], Lengths]:
        return np.arange(self.max_num_seqs), self.lengths[: self.max_num_seqs]

    @cached_property
    def step_seconds(self) -> Floats:
        """Seconds of a step without prompt rows, at each batch size from 1."""
        seconds: Floats = self.table.seconds[self._at]
        return seconds

    @cached_property
    def tokens_per_step(self) -> Floats:
        """Mean tokens per sequence and step, at each batch size."""
        return self.table.expected[self._at[1]]

    @cached_property
    def variance_of_tokens(self) -> Floats:
        """Variance of that number, at each batch size."""
        return self.table.variance[self._at[1]]

    def steps_for(self, num_tokens: float) -> Floats:
        """Mean steps that write `num_tokens` tokens, at each batch size, the last step's surplus included (Wald)."""
        expected, variance = self.tokens_per_step, self.variance_of_tokens
        surplus = (variance + expected**2 - expected) / (2.0 * expected)
        if num_tokens <= 0.0:
            return np.zeros_like(expected)
        steps: Floats = np.maximum(1.0, (num_tokens + surplus) / expected)
        return steps

    @property
    def request_cv(self) -> float:
        """How far requests differ in steps per token, deviation over mean; 0 where nothing is drafted."""
        return self.speculation.request_cv if self.speculation and self.max_draft_tokens else 0.0

    @property
    def max_draft_tokens(self) -> int:
        """The largest K of any batch size."""
        return int(self._at[1].max())

    def for_load(self, engine: EngineModel, load: Load) -> ServingPolicy:
        """The same settings under a load of other lengths: steps take longer with more context, and fewer may fit.

        Raises:
            ConfigError: not one of its sequences fits into the engine's KV memory.
        """
        limit = min(self.max_num_seqs, engine.places_beside(load, self.speculation))
        table = step_table(engine.step_times, self.speculation, max_batch_size=limit, context=mean_context(load))
        return replace(self, max_num_seqs=limit, table=table)

    @property
    def has_all_places(self) -> bool:
        """Whether it runs as many sequences at once as the engine can."""
        return self.max_num_seqs == len(self.table.seconds)

    @property
    def schedule(self) -> Schedule:
        """K by batch size."""
        return as_schedule(self._at[1])


def serving_policies(
    engine: EngineModel, speculations: Sequence[Speculation | None], load: Load
) -> list[ServingPolicy]:
    """All that may be planned: for each way to draft its K schedules up to each K, each fixed K, each batch limit.

    Raises:
        ConfigError: the load's sequences are longer than the engine allows, or not one fits into its KV memory.
    """
    num_tokens = load.isl + load.osl
    if num_tokens > engine.max_model_len:
        raise ConfigError(
            f"load: isl + osl is {num_tokens:g} tokens, and the profile's max_model_len {engine.max_model_len}; "
            f"must be at most that: profile with a larger --max-model-len"
        )
    policies = []
    for speculation in speculations:
        if speculation is None and not engine.has_plain_steps:
            continue
        most = min(engine.max_num_seqs, engine.places_beside(load, speculation))
        table = step_table(engine.step_times, speculation, max_batch_size=most, context=mean_context(load))
        seen: set[bytes] = set()
        for lengths, limit in itertools.product(_length_rules(table, speculation, most), _batch_limits(most)):
            used = lengths[:limit]
            if used.tobytes() in seen or (speculation is not None and not used.any()):
                continue
            seen.add(used.tobytes())
            policies.append(ServingPolicy(speculation=speculation, lengths=lengths, max_num_seqs=limit, table=table))
    return policies


def mean_context(load: Load) -> float:
    """Tokens that a running sequence has in the KV cache, on average; long answers run longer."""
    return load.isl + load.osl * (1.0 + load.osl_cv**2) / 2.0


def _length_rules(table: StepTable, speculation: Speculation | None, most: int) -> list[Lengths]:
    """The K by batch size that may be planned; where the engine chooses it, what it is expected to choose.

    A K that is above the best one at every batch size makes each token dearer and each step longer, so it is left out.
    """
    if speculation is not None and speculation.is_whole and speculation.whole_nodes is None:
        return [fixed_lengths(most, 1)]
    best = best_lengths(table)
    if speculation is not None and speculation.is_adaptive:
        return [best]
    rules = []
    for length in range(int(best.max()) + 1):
        rules += [
            steady_lengths(table, max_length=length),
            best_lengths(table, max_length=length),
            fixed_lengths(most, length),
        ]
    return rules


def _batch_limits(most: int) -> list[int]:
    limits = {most}
    power = 1
    while power < most:
        limits.add(power)
        power *= 2
    return sorted(limits)
