"""Synthetic acceptance for benchmarks: drafted tokens stand at given rates, right or wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from forerun.core.draft import Draft
from forerun.core.finite_numbers import is_number
from forerun.errors import ConfigError
from forerun.verify.base import Verdict, Verifier
from forerun.verify.judging import Chance, IndependentVerifier, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticConfig:
    """`rejection_sample_method: "synthetic"`, with exactly one of two ways to say how much is accepted.

    `synthetic_acceptance_rates` are the chances that the first 1, 2, ... K drafted tokens all stand;
    `synthetic_acceptance_length` is the mean number of tokens per step, bonus included, from 1 to K + 1.

    Raises:
        ConfigError: both or none are given, or a value is out of range.
    """

    synthetic_acceptance_rates: Sequence[float] | None = None
    synthetic_acceptance_length: float | None = None

    def __post_init__(self) -> None:
        if (self.synthetic_acceptance_rates is None) == (self.synthetic_acceptance_length is None):
            raise ConfigError(
                "rejection_sample_method 'synthetic': needs exactly one of synthetic_acceptance_rates "
                "and synthetic_acceptance_length; give one"
            )
        if self.synthetic_acceptance_rates is not None:
            _check_rates(self.synthetic_acceptance_rates)
        if self.synthetic_acceptance_length is not None:
            _check_length(self.synthetic_acceptance_length)

    def build(self, num_speculative_tokens: int, /) -> Verifier:
        """Make the verifier.

        Raises:
            ConfigError: the rates or the length do not fit drafts of `num_speculative_tokens`.
        """
        conditional = conditional_rates(self._marginal_rates(num_speculative_tokens))

        def judge(draft: Draft, target: Target, chance: Chance) -> Verdict:
            return accept_at_rates(draft, target, chance, rates=conditional)

        return IndependentVerifier(judge, is_lossless=False)

    def _marginal_rates(self, num_tokens: int) -> list[float]:
        if self.synthetic_acceptance_rates is not None:
            rates = list(self.synthetic_acceptance_rates)
            if len(rates) != num_tokens:
                raise ConfigError(
                    f"synthetic_acceptance_rates: got {len(rates)} rates; "
                    f"must be one for each of the {num_tokens} speculative tokens"
                )
            return rates
        assert self.synthetic_acceptance_length is not None, "checked on the way in"
        if self.synthetic_acceptance_length > num_tokens + 1:
            raise ConfigError(
                f"synthetic_acceptance_length: got {self.synthetic_acceptance_length}; must be from 1 to "
                f"{num_tokens + 1} for {num_tokens} speculative tokens; lower it or draft more"
            )
        return rates_of_length(self.synthetic_acceptance_length, num_tokens=num_tokens)


def rates_of_length(length: float, *, num_tokens: int) -> list[float]:
    """Marginal rates whose mean acceptance length is `length`: ones, then the fraction, then zeros."""
    return [min(1.0, max(0.0, length - 1.0 - position)) for position in range(num_tokens)]


def conditional_rates(marginal: Sequence[float]) -> list[float]:
    """Chance that each position is accepted given that the one before it was."""
    return [rate / before if before else 0.0 for before, rate in pairwise((1.0, *marginal))]


def accept_at_rates(draft: Draft, target: Target, chance: Chance, *, rates: Sequence[float]) -> Verdict:
    """Walk down the first children, accepting the one at depth i + 1 with rate i, then the target's own token."""
    children = draft.children()
    accepted: list[int] = []
    node = -1
    for rate in rates:
        if not children[node + 1] or not chance.accepts(children[node + 1][0], rate):
            break
        node = children[node + 1][0]
        accepted.append(node)
    return Verdict(tuple(accepted), target.token(node))


def _check_rates(rates: Sequence[float]) -> None:
    fits = isinstance(rates, (list, tuple)) and all(is_number(rate) and 0.0 <= rate <= 1.0 for rate in rates)
    if not fits or any(later > earlier for earlier, later in pairwise(rates)):
        raise ConfigError(
            f"synthetic_acceptance_rates: got {rates!r}; must be a list of numbers from 0 to 1 that never rise, "
            "the chance that the draft stands at least that far"
        )


def _check_length(length: float) -> None:
    if not is_number(length) or length < 1.0:
        raise ConfigError(
            f"synthetic_acceptance_length: got {length!r}; must be a number from 1 to num_speculative_tokens + 1"
        )
