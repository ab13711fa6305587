"""Texts such as "rate=20,isl=3000" as numbers by name, with units of time where they are meant."""

from __future__ import annotations

import math
import re

from forerun.errors import ConfigError, refuse_unknown_keys

SECONDS_PER_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_assignments(text: str, *, durations: frozenset[str], numbers: frozenset[str], where: str) -> dict[str, float]:
    """Return the values of "name=value,name=value" by name.

    Args:
        text: e.g. "ttft=500ms,attainment=0.9".
        durations: names whose values need a unit: us, ms or s; returned in seconds.
        numbers: names whose values are plain numbers.
        where: what the text is, for errors, e.g. "--sla".

    Raises:
        ConfigError: a part is no assignment, a name is unknown or comes twice, or a value is no finite number.
    """
    values: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not value:
            raise ConfigError(f"{where}: got {part!r}; must be name=value, several joined by commas")
        refuse_unknown_keys([name], durations | numbers, where=where)
        if name in values:
            raise ConfigError(f"{where}: {name} is given twice in {text!r}; give it once")
        values[name] = _duration(name, value, where) if name in durations else _number(name, value, where)
    return values


def _duration(name: str, value: str, where: str) -> float:
    match = re.fullmatch(r"(.*?)\s*(us|ms|s)", value)
    if match is None:
        raise ConfigError(
            f"{where}: got {name}={value}; must be a time with its unit, e.g. {name}=500ms or {name}=0.5s"
        )
    return _number(name, match[1], where) * SECONDS_PER_UNIT[match[2]]


def _number(name: str, value: str, where: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{where}: got {name}={value}; must be a finite number")
    return number
