"""How many tokens drafts yield: the chance of each drafted place to stand, and what follows from it.

A step verifies k drafted tokens and yields those of them that stand, up to the first that does not, and one
token of the target's own. With a_i the chance that place i stands where all before it do, s_i = a_1 ... a_i
is the chance that at least i stand, and a step yields E(k) = 1 + s_1 + ... + s_k tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceProfile:
    """The chance of each place of a draft to stand, given that those before it do.

    A place that nobody drafted counts as one that does not stand, so that chances hold for every step in
    which a draft is asked for; `proposed` says how often each place is drafted at all (empty: always).
    `num_reached` is how many steps each chance was counted over: those in which all places before it stood
    (empty: not known). `mean_nodes` is how many nodes the drafts had on average: a tree has more of them than
    places (None: not known).

    Raises:
        ConfigError: there is no place, a chance is not from 0 to 1, a count is negative, or lengths differ.
    """

    method: str
    conditional: tuple[float, ...]
    num_reached: tuple[int, ...] = ()
    proposed: tuple[float, ...] = ()
    mean_nodes: float | None = None

    def __post_init__(self) -> None:
        if not self.conditional:
            raise ConfigError(f"acceptance of {self.method}: got no rate; give one or more")
        for name, values in (("conditional", self.conditional), ("proposed", self.proposed)):
            for value in values:
                if not 0.0 <= value <= 1.0:
                    raise ConfigError(
                        f"acceptance of {self.method}: got {value} among the {name} rates; must be from 0 to 1"
                    )
        for name, length in (("num_reached", len(self.num_reached)), ("proposed", len(self.proposed))):
            if length not in (0, len(self.conditional)):
                raise ConfigError(
                    f"acceptance of {self.method}: got {length} values of {name} and {len(self.conditional)} rates; "
                    "must be as many, or none"
                )
        if any(count < 0 for count in self.num_reached):
            raise ConfigError(f"acceptance of {self.method}: got a negative count; profile again")
        if self.mean_nodes is not None and not 0.0 <= self.mean_nodes < math.inf:
            raise ConfigError(
                f"acceptance of {self.method}: got {self.mean_nodes!r} nodes of a draft; must be a number, at least 0"
            )

    @classmethod
    def of_counts(
        cls,
        method: str,
        num_steps: int,
        num_stood: Sequence[int],
        num_proposed: Sequence[int] = (),
        *,
        num_nodes: int | None = None,
    ) -> AcceptanceProfile:
        """The rates of steps of which `num_stood[i]` accepted more than i tokens.

        Places after the first that never stood are left out: nothing is known of them.

        Args:
            method: of the drafter.
            num_steps: in which a draft was asked for.
            num_stood: for each place, the steps whose draft stood there and before.
            num_proposed: for each place, the steps in which it was drafted; empty: not known.
            num_nodes: of the drafts of all steps; None: not known.

        Raises:
            ConfigError: there is no step or no place.
        """
        if num_steps < 1 or not num_stood:
            raise ConfigError(f"acceptance of {method}: no draft was judged; measure with more or longer texts")
        reached = [num_steps, *num_stood[:-1]]
        known = [place for place, count in enumerate(reached) if count > 0]
        return cls(
            method=method,
            conditional=tuple(num_stood[place] / reached[place] for place in known),
            num_reached=tuple(reached[place] for place in known),
            proposed=tuple(num_proposed[place] / num_steps for place in known) if num_proposed else (),
            mean_nodes=None if num_nodes is None else num_nodes / num_steps,
        )

    @property
    def num_places(self) -> int:
        """The longest draft that is known."""
        return len(self.conditional)

    @property
    def marginal(self) -> tuple[float, ...]:
        """The chance of each place to stand, s_i: all before it included."""
        return tuple(np.cumprod(self.conditional).tolist())

    @property
    def mean_accept_length(self) -> float:
        """E: mean tokens of a step that verifies all places, the target's own included."""
        return self.expected(self.num_places)

    def expected(self, k: int, /) -> float:
        """E(k): mean tokens of a step that verifies k drafted ones, the target's own included."""
        self._check(k)
        return 1.0 + sum(self.marginal[:k])

    def mean_draft_tokens(self, k: int, /) -> float:
        """Mean tokens that a chain of at most k has; of a tree the mean depth."""
        self._check(k)
        return sum(self.proposed[:k]) if self.proposed else float(k)

    def pmf(self, k: int, /) -> npt.NDArray[np.float64]:
        """The chance that exactly 0, 1, ..., k of k drafted tokens stand, [k + 1]; a step yields one token more."""
        self._check(k)
        at_least = np.array([1.0, *self.marginal[:k], 0.0])
        chances: npt.NDArray[np.float64] = at_least[:-1] - at_least[1:]
        return chances

    def variance(self, k: int, /) -> float:
        """The variance of the tokens of a step that verifies k drafted ones."""
        chances = self.pmf(k)
        counts = np.arange(k + 1)
        return max(0.0, float(chances @ counts**2 - (chances @ counts) ** 2))

    def lower(self, confidence: float) -> AcceptanceProfile:
        """The profile with each rate at the lower end of its interval (Wilson, 1927), for careful plans.

        Args:
            confidence: the chance that a rate is at least that, from 0.5 to below 1.

        Raises:
            ConfigError: the confidence is out of range, or nobody counted how many steps there were.
        """
        if not 0.5 <= confidence < 1.0:
            raise ConfigError(f"confidence: got {confidence}; must be from 0.5 to below 1")
        if not self.num_reached:
            raise ConfigError(
                f"acceptance of {self.method}: has no counts, and so no interval, as it was corrected or not counted; leave "
                "--confidence out, or plan with the acceptance that was profiled"
            )
        z = NormalDist().inv_cdf(confidence)
        rates = []
        for rate, count in zip(self.conditional, self.num_reached, strict=True):
            if not count:
                rates.append(0.0)
                continue
            middle = rate + z * z / (2 * count)
            width = z * math.sqrt(rate * (1.0 - rate) / count + z * z / (4 * count * count))
            rates.append(max(0.0, (middle - width) / (1.0 + z * z / count)))
        return AcceptanceProfile(
            method=self.method,
            conditional=tuple(rates),
            num_reached=self.num_reached,
            proposed=self.proposed,
            mean_nodes=self.mean_nodes,
        )

    def to_json(self, **measurement_conditions: Any) -> dict[str, Any]:
        """The profile with ModelOpt's keys, and three of our own: `num_reached`, `proposed_rates` and `mean_draft_nodes`.

        `acceptance_length_histogram` has the measured steps by the tokens that they yielded, where they were counted.
        """
        histogram: dict[str, int] = {}
        if self.num_reached:
            last = round(self.num_reached[-1] * self.conditional[-1])
            at_least = [*self.num_reached, last, 0]
            histogram = {str(tokens): at_least[tokens - 1] - at_least[tokens] for tokens in range(1, len(at_least))}
        return {
            "method": self.method,
            "num_speculative_tokens": self.num_places,
            "conditional_accept_rates": list(self.conditional),
            "marginal_accept_rates": list(self.marginal),
            "mean_accept_length": self.mean_accept_length,
            "acceptance_length_histogram": histogram,
            "max_supported_k": self.num_places,
            "accept_length_model": "1 + sum(marginal_accept_rates[:k])",
            "measurement_conditions": measurement_conditions,
            "num_reached": list(self.num_reached),
            "proposed_rates": list(self.proposed),
            "mean_draft_nodes": self.mean_nodes,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> AcceptanceProfile:
        """The profile of a record that `to_json` or ModelOpt made; other keys than the rates are not needed.

        Raises:
            ConfigError: the rates are missing or out of range.
        """
        try:
            nodes = record.get("mean_draft_nodes")
            return cls(
                method=str(record["method"]),
                conditional=tuple(float(rate) for rate in record["conditional_accept_rates"]),
                num_reached=tuple(int(count) for count in record.get("num_reached", ())),
                proposed=tuple(float(rate) for rate in record.get("proposed_rates", ())),
                mean_nodes=None if nodes is None else float(nodes),
            )
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError) as problem:
            why = f"lacks {problem}" if isinstance(problem, KeyError) else str(problem)
            raise ConfigError(f"acceptance: the record is damaged ({why}); profile again") from None

    def _check(self, k: int) -> None:
        if not 0 <= k <= self.num_places:
            raise ConfigError(
                f"acceptance of {self.method}: got k={k}; must be from 0 to {self.num_places}, the places that are known: "
                "profile longer drafts"
            )
