"""Lossy acceptance: a drafted token stands if the target finds it likely enough, drawn or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from forerun.core.draft import Draft
from forerun.core.finite_numbers import is_number
from forerun.errors import ConfigError
from forerun.verify.base import Verdict, Verifier
from forerun.verify.judging import Chance, IndependentVerifier, Judge, Target
from forerun.verify.matching import is_settled_by_matching, match


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalConfig:
    """`rejection_sample_method: "typical"`: Medusa's typical acceptance (arXiv 2401.10774).

    A token stands if its target probability exceeds
    min(`posterior_threshold`, `posterior_alpha` * exp(-entropy of the target)).

    Raises:
        ConfigError: a value is not between 0 and 1.
    """

    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3

    def __post_init__(self) -> None:
        _check_probability("posterior_threshold", self.posterior_threshold)
        _check_probability("posterior_alpha", self.posterior_alpha)

    def build(self, _num_speculative_tokens: int, /) -> Verifier:
        """Make the verifier; drafts may have any size."""

        def floor(target_probs: Tensor) -> float:
            entropy = float(torch.special.entr(target_probs).sum())  # nats
            return min(self.posterior_threshold, self.posterior_alpha * math.exp(-entropy))

        return IndependentVerifier(_accepting_above(floor), is_lossless=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdConfig:
    """`rejection_sample_method: "threshold"`: a token stands if its target probability exceeds a fixed one.

    Raises:
        ConfigError: the threshold is not between 0 and 1.
    """

    acceptance_threshold: float = 0.3

    def __post_init__(self) -> None:
        _check_probability("acceptance_threshold", self.acceptance_threshold)

    def build(self, _num_speculative_tokens: int, /) -> Verifier:
        """Make the verifier; drafts may have any size."""
        return IndependentVerifier(_accepting_above(lambda _: self.acceptance_threshold), is_lossless=False)


def _accepting_above(floor: Callable[[Tensor], float]) -> Judge:
    """A judge for which tokens whose target probability exceeds `floor(target_probs)` stand."""

    def judge(draft: Draft, target: Target, _chance: Chance) -> Verdict:
        if is_settled_by_matching(draft, target):
            return match(draft, target)
        return longest_above(draft, target, floor)

    return judge


def longest_above(draft: Draft, target: Target, floor: Callable[[Tensor], float]) -> Verdict:
    """Accept the longest path of tokens above the floor (the first of several), then the target's own token."""

    @cache
    def judged(place: int) -> tuple[Tensor, float]:
        probs = target.probs(place)
        return probs, floor(probs)

    length = {-1: 0}
    for node, token_id in enumerate(draft.token_ids):
        parent = draft.parent(node)
        if parent in length:
            probs, least = judged(parent)
            if float(probs[token_id]) > least:
                length[node] = length[parent] + 1
    last = max(length, key=length.__getitem__)
    return Verdict(tuple(draft.path(last)), target.token(last))


def _check_probability(name: str, value: object) -> None:
    if not is_number(value) or not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name}: got {value!r}; must be a number from 0 to 1; lower accepts more")
