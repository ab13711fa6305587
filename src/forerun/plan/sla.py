"""A service level: the latencies that are promised, and to what share of the requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from forerun.errors import ConfigError, refuse_unknown_keys
from forerun.plan.assignments import parse_assignments

LATENCIES = ("ttft", "tpot", "icl", "e2el")
DEFAULT_ATTAINMENT = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Sla:
    """Limits in seconds that a request must keep; None: no limit. A request attains the SLA if it keeps all.

    `ttft` is the time from a request's arrival to its first token. `tpot` is the request's mean time per token after
    that, (e2el - ttft) / (tokens - 1): vLLM's TPOT, and what Dynamo and aiperf call inter-token latency. `icl` is the mean
    time between two messages of its stream: with speculation a message holds several tokens, so icl is above tpot.
    `e2el` is the time from arrival to the last token. `attainment` is the share of requests that must attain it.

    Raises:
        ConfigError: a limit or the attainment is out of range, or there is no limit at all.
    """

    ttft: float | None = None
    tpot: float | None = None
    icl: float | None = None
    e2el: float | None = None
    attainment: float = DEFAULT_ATTAINMENT

    def __post_init__(self) -> None:
        limits = {name: getattr(self, name) for name in LATENCIES}
        if all(limit is None for limit in limits.values()):
            raise ConfigError("sla: no limit is given; give at least one, e.g. ttft=500ms,itl=50ms")
        for name, limit in limits.items():
            if limit is not None and not 0.0 < limit < math.inf:
                shown = "tpot (itl)" if name == "tpot" else name
                raise ConfigError(f"sla: got {shown}={limit:g} s; no request takes no time: must be above 0")
        if not 0.0 < self.attainment < 1.0:
            raise ConfigError(f"sla: got attainment={self.attainment:g}; must be above 0 and below 1")

    def is_met(self, *, ttft: float, tpot: float, icl: float, e2el: float) -> bool:
        """Whether a request of these times, in seconds, attains the SLA."""
        times = (ttft, tpot, icl, e2el)
        limits = (self.ttft, self.tpot, self.icl, self.e2el)
        return all(limit is None or time <= limit for time, limit in zip(times, limits, strict=True))

    def to_json(self) -> dict[str, float | None]:
        """The record as `from_json` reads it; times in milliseconds."""
        times = {f"{name}_ms": getattr(self, name) for name in LATENCIES}
        limits = {name: None if limit is None else limit * 1e3 for name, limit in times.items()}
        return limits | {"attainment": self.attainment}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Sla:
        """The SLA of a record that `to_json` made.

        Raises:
            ConfigError: a key is unknown or a value out of range.
        """
        refuse_unknown_keys(record, [*(f"{name}_ms" for name in LATENCIES), "attainment"], where="sla")
        given = {name: record[f"{name}_ms"] for name in LATENCIES if record.get(f"{name}_ms") is not None}
        limits = {name: limit / 1e3 for name, limit in given.items()}
        return cls(**limits, attainment=record.get("attainment", DEFAULT_ATTAINMENT))


def parse_sla(text: str) -> Sla:
    """Parse "ttft=500ms,itl=50ms", optionally with icl, e2el and attainment; itl and tpot are the same.

    Raises:
        ConfigError: the text is no such list, or a number is out of range.
    """
    durations = frozenset({*LATENCIES, "itl"})
    values = parse_assignments(text, durations=durations, numbers=frozenset({"attainment"}), where="sla")
    if "itl" in values:
        if "tpot" in values:
            raise ConfigError("sla: got both itl and tpot, which are the same; give one")
        values["tpot"] = values.pop("itl")
    return Sla(**values)
