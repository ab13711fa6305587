"""Goals of goodput, in the words of `vllm bench serve --goodput` and of guidellm, as a service level."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from forerun.errors import ConfigError, did_you_mean
from forerun.plan.sla import DEFAULT_ATTAINMENT, Sla

LIMITS = ("ttft", "tpot", "e2el")
"""What vLLM's and guidellm's goals limit."""

ATTAINMENT_KEYS = ("target_attainment", "attainment")
EXAMPLE = "ttft:500 tpot:50 e2el:5000"


def parse_goodput(words: Sequence[str]) -> Sla:
    """Parse goals in milliseconds.

    Args:
        words: "ttft:500", "tpot:50", "e2el:5000" (vLLM); or "ttft_ms=500", "target_attainment=0.9" or one JSON
            object of such keys (guidellm's GoodputSLO).

    Raises:
        ConfigError: a word is none of these, a name comes twice, or a value is out of range.
    """
    limits: dict[str, float] = {}
    attainment: float | None = None
    for word in words:
        for key, value in _pairs(word):
            number = _number(key, value)
            name = key.removesuffix("_ms")
            if key in ATTAINMENT_KEYS and attainment is None:
                attainment = number
            elif key not in ATTAINMENT_KEYS and name in LIMITS and name not in limits:
                limits[name] = number / 1e3
            elif name in LIMITS or key in ATTAINMENT_KEYS:
                raise ConfigError(f"--goodput: got {key} twice; give it once")
            else:
                known = (*LIMITS, *(f"{limit}_ms" for limit in LIMITS), *ATTAINMENT_KEYS)
                raise ConfigError(f"--goodput: got {word!r:.100}{did_you_mean(key, known)}")
    if not limits:
        raise ConfigError(f"--goodput: no limit is given; give one or more, e.g. {EXAMPLE}")
    return Sla(**limits, attainment=DEFAULT_ATTAINMENT if attainment is None else attainment)


def _pairs(word: str) -> list[tuple[str, Any]]:
    """Name and value of each goal in a word."""
    if word.lstrip().startswith("{"):
        try:
            found = json.loads(word)
        except ValueError as error:
            raise ConfigError(f'--goodput: not JSON ({error}); write e.g. {{"ttft_ms": 500, "tpot_ms": 50}}') from None
        return [(name, value) for name, value in found.items() if value is not None]  # guidellm writes null for none
    for separator in (":", "="):
        name, found_one, value = word.partition(separator)
        if found_one:
            return [(name.strip(), value)]
    raise ConfigError(f"--goodput: got {word!r:.100}; must be NAME:MILLISECONDS, e.g. {EXAMPLE}")


def _number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"--goodput: got {name} {value!r:.80}; must be a finite number, of milliseconds for a limit")
    return number
