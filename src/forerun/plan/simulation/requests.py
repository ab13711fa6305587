"""The requests of a simulation: when they arrive, how long they are, and which of their prompts begin alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from forerun.core.random_bits import key_of, uniform_row
from forerun.errors import ConfigError
from forerun.plan.lengths import NEGLIGIBLE
from forerun.plan.load import Load
from forerun.plan.simulation.arrivals import ArrivalPattern, Floats

PROMPT_KEY, PIECE_KEY = 1, 2  # streams of prompt tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """One request: its arrival in seconds, its tokens, and what is known of their content.

    `piece_hashes` name the contents of the prompt's pieces of `piece_size` tokens, the last perhaps partial:
    prompts whose pieces have the same names up to some place have the same tokens up to there. Whatever
    they leave over is the request's own. `prompt_ids`, if given, are the tokens themselves. `kind` is the
    prompt's class, of whose recorded texts the request meets the drafts; None: of any. `text` is the number of
    a recorded text, which the request then repeats.
    """

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    piece_hashes: tuple[int, ...] = ()
    piece_size: int = 512
    prompt_ids: Sequence[int] | None = None
    kind: str | None = None
    text: int | None = None

    def prompt_tokens(self, number: int, *, vocab_size: int, seed: int) -> list[int]:
        """The tokens of the prompt, where this is request `number` of its simulation."""
        if self.prompt_ids is not None:
            return list(self.prompt_ids)
        tokens: list[int] = []
        for piece in self.piece_hashes:
            tokens += _tokens(key_of(PIECE_KEY, seed, piece), self.piece_size, vocab_size)
        del tokens[self.num_prompt_tokens :]
        num_own = self.num_prompt_tokens - len(tokens)
        return tokens + _tokens(key_of(PROMPT_KEY, seed, number), num_own, vocab_size) if num_own else tokens


def _tokens(key: int, count: int, vocab_size: int) -> list[int]:
    found: list[int] = (uniform_row(key, count) * vocab_size).astype(np.int64).tolist()
    return found


def synthetic_requests(
    load: Load, count: int, *, seed: int = 0, pattern: ArrivalPattern | None = None
) -> list[SimulatedRequest]:
    """Draw `count` requests of a load.

    Lengths are gamma-distributed with the load's means and coefficients of variation, rounded, at least 1.
    A prefix hit rate is a beginning that all prompts share, of that share of the mean prompt.

    Args:
        load: rate and lengths.
        count: how many.
        seed: the same seed gives the same requests, and with a larger count the same and more.
        pattern: when they arrive; None: at the load's rate, as unevenly as its `cv` says.
    """
    pattern = ArrivalPattern.steady(load.rate, cv=load.cv) if pattern is None else pattern
    of_arrivals, of_prompts, of_answers = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    prompts = _lengths(load.isl, load.isl_cv, count, of_prompts)
    answers = _lengths(load.osl, load.osl_cv, count, of_answers)
    num_shared = round(load.isl * load.prefix_hit_rate)
    return [
        SimulatedRequest(
            arrival=arrival,
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            piece_hashes=(0,) if num_shared else (),
            piece_size=num_shared,
        )
        for arrival, num_prompt, num_output in zip(
            pattern.times(count, of_arrivals).tolist(), prompts, answers, strict=True
        )
    ]


def with_arrivals(requests: Iterable[SimulatedRequest], times: Floats) -> list[SimulatedRequest]:
    """The same requests at other times, in their order."""
    return [replace(one, arrival=arrival) for one, arrival in zip(requests, times.tolist(), strict=True)]


def check_requests(requests: Sequence[SimulatedRequest], *, max_model_len: int) -> None:
    """Check what a simulation relies on.

    Raises:
        ConfigError: there is none, they are not in the order of their arrival, or one is longer than the model's context.
    """
    if not requests:
        raise ConfigError("requests: got none; a simulation needs at least one")
    if requests[0].arrival < 0:
        raise ConfigError(f"requests: the first arrives at {requests[0].arrival:g} s; times begin at 0")
    for number, (before, after) in enumerate(pairwise(requests), 1):
        if after.arrival < before.arrival:
            raise ConfigError(
                f"requests: number {number} (from 0) arrives at {after.arrival:g} s, before the one ahead of it "
                f"({before.arrival:g} s); sort them by time"
            )
    for number, one in enumerate(requests):
        if one.num_prompt_tokens < 1 or one.num_output_tokens < 1:
            raise ConfigError(
                f"requests: number {number} (from 0) has {one.num_prompt_tokens} prompt and {one.num_output_tokens} "
                "output tokens; each must be 1 or more"
            )
        if one.num_prompt_tokens + one.num_output_tokens > max_model_len:
            raise ConfigError(
                f"requests: number {number} (from 0) has {one.num_prompt_tokens} prompt and {one.num_output_tokens} output "
                f"tokens, together more than max_model_len ({max_model_len}); leave out longer ones, or let the "
                "lengths of a load spread less, or profile with a longer context"
            )


def _lengths(mean: float, cv: float, count: int, random: np.random.Generator) -> list[int]:
    if cv < NEGLIGIBLE:
        return [max(1, round(mean))] * count
    drawn = random.gamma(cv**-2, mean * cv**2, count)
    found: list[int] = np.maximum(1, np.rint(drawn)).astype(np.int64).tolist()
    return found
