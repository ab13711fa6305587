"""How the requests of a tuning come: at a rate, or from clients that each wait for their answer."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from forerun.errors import ConfigError
from forerun.plan.assignments import parse_assignments
from forerun.plan.load import MOST_CV

EXAMPLE = "rate=2 or concurrency=4"
LENGTHS = ("isl", "osl", "isl_cv", "osl_cv")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """Requests per second, or clients; the requests' lengths are those of the prompts and of their answers.

    `rate` is requests that arrive per second, whether or not earlier ones are answered (open loop); `burstiness`
    is the shape of the gamma distribution of the times between them: 1 is a Poisson process, less comes in
    bursts, infinity is a fixed beat. `concurrency` is clients that each send a request when the one before is
    answered (closed loop). One of the two is given.

    Raises:
        ConfigError: none or both of them are given, or one is out of range.
    """

    rate: float | None = None
    concurrency: int | None = None
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            got = "none" if self.rate is None else "both"
            raise ConfigError(f"load: got {got} of rate and concurrency; give one, e.g. {EXAMPLE}")
        if self.rate is not None and not 0.0 < self.rate < math.inf:
            raise ConfigError(f"load: got rate={self.rate:g}; must be a number above 0")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"load: got concurrency={self.concurrency:g}; must be 1 or more")
        if not self.burstiness > 0.0 or self.burstiness**-0.5 > MOST_CV:
            raise ConfigError(
                f"load: got burstiness={self.burstiness:g}; must be above 0, and 1 / its root, which is cv, at most {MOST_CV:g}"
            )

    def most_running(self, max_num_seqs: int) -> int:
        """The most sequences that can run at once under this limit."""
        return max_num_seqs if self.concurrency is None else min(max_num_seqs, self.concurrency)

    def describe(self) -> str:
        """A phrase for reports."""
        if self.concurrency is not None:
            return "1 client" if self.concurrency == 1 else f"{self.concurrency} clients"
        bursts = "" if self.burstiness == 1.0 else f", burstiness {self.burstiness:g}"
        return f"{self.rate:g} requests/s{bursts}"

    def to_json(self) -> dict[str, Any]:
        """The record as JSON; an infinite burstiness is the text "inf", as in `vllm bench serve`."""
        return asdict(self) | {"burstiness": "inf" if math.isinf(self.burstiness) else self.burstiness}


def parse_offered_load(text: str) -> OfferedLoad:
    """Parse "rate=2", "rate=2,burstiness=0.5", "rate=2,cv=2" or "concurrency=4"; cv is 1 / sqrt(burstiness).

    Raises:
        ConfigError: the text is no such list, gives lengths, or a number is out of range.
    """
    names = frozenset({"rate", "concurrency", "burstiness", "cv", *LENGTHS})
    values = parse_assignments(text, durations=frozenset(), numbers=names, where="load")
    for name in LENGTHS:
        if name in values:
            raise ConfigError(
                f"load: got {name}={values[name]:g}; the prompts have their own lengths and the model ends its answers: "
                f"leave it out, and write e.g. {EXAMPLE}"
            )
    if "concurrency" in values and ("cv" in values or "burstiness" in values):
        raise ConfigError("load: got concurrency with cv or burstiness, which say how a rate comes; leave them out")
    if "cv" in values:
        if "burstiness" in values:
            raise ConfigError("load: got both cv and burstiness, which is 1 / cv²; give one")
        cv = values.pop("cv")
        if cv < 0.0:
            raise ConfigError(f"load: got cv={cv:g}; must be 0 or more")
        variance = cv * cv
        values["burstiness"] = math.inf if variance == 0.0 else 1.0 / variance
    concurrency = values.pop("concurrency", None)
    if concurrency is not None and concurrency != int(concurrency):
        raise ConfigError(f"load: got concurrency={concurrency:g}; must be a whole number")
    return OfferedLoad(concurrency=None if concurrency is None else int(concurrency), **values)
