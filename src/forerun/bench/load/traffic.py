"""When requests are sent: all at once, at a rate, at one that rises, or as answers come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from forerun.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """How many requests come when, under the names and with the defaults of `vllm bench serve`."""

    request_rate: float = math.inf
    """Requests per second on average; inf sends them all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the gaps: 1 is a Poisson process, less comes in bursts, inf is a fixed beat."""
    ramp_up_strategy: Literal["linear", "exponential"] | None = None
    """Let the rate rise over the requests, from --ramp-up-start-rps to --ramp-up-end-rps."""
    ramp_up_start_rps: float | None = None
    """Requests per second at the start of the rise."""
    ramp_up_end_rps: float | None = None
    """Requests per second at its end."""
    max_concurrency: int | None = None
    """Requests under way at the same time, at most; the others wait on this side."""
    duration: float | None = None
    """Send for this many seconds instead of a number of requests; those under way are waited for."""
    num_warmups: int = 0
    """Requests sent before the clock counts."""

    def __post_init__(self) -> None:
        for name, least in (("max_concurrency", 1), ("num_warmups", 0)):
            value = vars(self)[name]
            if value is not None and value < least:
                raise ConfigError(f"{name}: got {value}; must be {least} or more")
        for name in ("request_rate", "burstiness", "duration", "ramp_up_start_rps", "ramp_up_end_rps"):
            value = vars(self)[name]
            if value is not None and not value > 0:
                raise ConfigError(f"{name}: got {value}; must be more than 0")
        for name in ("duration", "ramp_up_start_rps", "ramp_up_end_rps"):
            if vars(self)[name] == math.inf:
                raise ConfigError(f"{name}: got inf; must be a number")
        self._check_ramp()
        if self.is_closed_loop and self.max_concurrency is None:
            raise ConfigError(
                "duration: got no limit on what is sent in that time; give request_rate, max_concurrency or a ramp-up too"
            )

    def _check_ramp(self) -> None:
        start, end = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is None:
            if start is not None or end is not None:
                raise ConfigError("ramp_up_start_rps, ramp_up_end_rps: given without ramp_up_strategy; give that too")
            return
        if start is None or end is None:
            raise ConfigError(f"ramp_up_strategy: got {self.ramp_up_strategy!r}; give its start and end rps too")
        if start > end:
            raise ConfigError(f"ramp_up_start_rps: got {start:g}; must be at most ramp_up_end_rps, {end:g}")
        if self.request_rate != math.inf:
            raise ConfigError(f"request_rate: got {self.request_rate:g} with a ramp-up, which sets it; leave one out")

    @property
    def is_closed_loop(self) -> bool:
        """Whether each answer calls for the next request, until the time is up."""
        return self.duration is not None and not self.has_rate

    @property
    def has_rate(self) -> bool:
        """Whether requests come spread over time."""
        return self.ramp_up_strategy is not None or self.request_rate != math.inf
