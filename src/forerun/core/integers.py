"""Whole numbers among what a user sets."""

from __future__ import annotations

from typing import TypeGuard

from forerun.errors import ConfigError


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer; True and False are none here, whatever Python says."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_integer(
    name: str, value: object, *, least: int, most: int | None = None, do: str = "leave it out for the default"
) -> None:
    """Refuse a setting that is no integer, or too small or too large a one.

    Args:
        name: of the setting.
        value: as the user has it.
        least: that it may be.
        most: that it may be; None: there is no limit.
        do: what the user should do, as the error ends.

    Raises:
        ConfigError: it is none, or out of range.
    """
    if not is_integer(value) or value < least or (most is not None and value > most):
        may_be = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name}: got {value!r:.80}; must be an integer {may_be}; {do}")
