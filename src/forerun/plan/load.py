"""A load: how many requests arrive, how long they are, how unevenly they come."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from forerun.errors import ConfigError, refuse_unknown_keys
from forerun.plan.assignments import parse_assignments

MOST_CV = 1e6  # whose powers are finite; that of N times or lengths is below the root of N

KEYS = frozenset({"rate", "isl", "osl", "isl_cv", "osl_cv", "cv", "prefix_hit_rate"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that arrive at a service, by their means and how far they spread.

    `rate` is requests that arrive per second, whether they are served or not. `isl` and `osl` are mean tokens
    of prompt and answer (input and output sequence length). `cv` is the coefficient of variation (deviation
    over mean) of the times between arrivals: 1 as in a Poisson process, 0 evenly, above 1 in bursts. `isl_cv`
    and `osl_cv` are the same of the lengths. `prefix_hit_rate` is the share of prompt tokens whose KV is found
    in the prefix cache; it is taken for one beginning that all prompts share.

    Raises:
        ConfigError: a number is out of range.
    """

    rate: float
    isl: float
    osl: float
    cv: float = 1.0
    isl_cv: float = 0.0
    osl_cv: float = 0.0
    prefix_hit_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rate", "isl", "osl"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise ConfigError(f"load: got {name}={value:g}; must be a number above 0")
        if self.osl < 1.0 or self.isl < 1.0:
            raise ConfigError(f"load: got isl={self.isl:g}, osl={self.osl:g}; each must be at least 1 token")
        for name in ("cv", "isl_cv", "osl_cv"):
            value = getattr(self, name)
            if not 0.0 <= value <= MOST_CV:
                raise ConfigError(f"load: got {name}={value:g}; must be a number from 0 to {MOST_CV:g}")
        if not 0.0 <= self.prefix_hit_rate < 1.0:
            raise ConfigError(f"load: got prefix_hit_rate={self.prefix_hit_rate:g}; must be from 0 to below 1")

    @property
    def burstiness(self) -> float:
        """What `vllm bench serve --burstiness` makes the same arrivals of: 1 / cv², infinite where they are even."""
        return math.inf if self.cv == 0.0 else self.cv**-2

    @property
    def computed_isl(self) -> float:
        """Mean prompt tokens that must be computed, as the prefix cache has not got them; at least 1."""
        return max(1.0, self.isl * (1.0 - self.prefix_hit_rate))

    @property
    def tokens_per_second(self) -> float:
        """Output tokens asked for per second."""
        return self.rate * self.osl

    def to_json(self) -> dict[str, float]:
        """The record as `from_json` reads it."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Load:
        """The load of a record that `to_json` made.

        Raises:
            ConfigError: a key is missing or unknown, or a value out of range.
        """
        refuse_unknown_keys(record, KEYS, where="load")
        missing = sorted({"rate", "isl", "osl"} - set(record))
        if missing:
            raise ConfigError(f"load: {', '.join(missing)} missing; give e.g. rate=20,isl=3000,osl=300")
        return cls(**record)


class GivenLoad(NamedTuple):
    """A load as a text has it, and the share of prompts in the prefix cache that it names; None: it names none."""

    load: Load
    named_hit_rate: float | None


def parse_given_load(text: str) -> GivenLoad:
    """Parse "rate=20,isl=3000,osl=300", optionally with isl_cv, osl_cv, prefix_hit_rate, and cv or burstiness.

    Raises:
        ConfigError: the text is no such list, or a number is out of range.
    """
    where = "load"
    values = parse_assignments(text, durations=frozenset(), numbers=KEYS | {"burstiness"}, where=where)
    if "burstiness" in values:
        if "cv" in values:
            raise ConfigError("load: got both cv and burstiness, which is 1 / cv²; give one")
        burstiness = values.pop("burstiness")
        if burstiness <= 0.0:
            raise ConfigError(f"load: got burstiness={burstiness:g}; must be a number above 0")
        values["cv"] = burstiness**-0.5
    return GivenLoad(Load.from_json(values), values.get("prefix_hit_rate"))


def parse_load(text: str) -> Load:
    """The load of such a text; see `parse_given_load`."""
    return parse_given_load(text).load
