"""Checks of what a file of JSON has under a name: of the right type, or an error that names it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from forerun.core.finite_numbers import is_number
from forerun.core.integers import is_integer
from forerun.errors import ConfigError

JSON_NAMES = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}
"""How messages call types."""

MOST_COUNT = 2**53
"""Of anything: beyond it not every whole number is a float, with which is computed."""


def check_type(what: str, name: str, value: object, wanted: type, *, or_none: bool = False, do: str) -> None:
    """Refuse a value of another type.

    Args:
        what: what is checked, as the error begins.
        name: of the value.
        value: as the file has it.
        wanted: a type of `JSON_NAMES`.
        or_none: whether null is right too.
        do: what the user should do, as the error ends.
    """
    if not isinstance(value, wanted) and not (or_none and value is None):
        may_be = f"{JSON_NAMES[wanted]}{' or null' if or_none else ''}"
        raise ConfigError(f"{what}: got {name}={value!r:.80}; must be {may_be}: {do}")


def check_count(
    what: str, name: str, value: object, *, least: int, most: int = MOST_COUNT, or_none: bool = False, do: str
) -> None:
    """Refuse what is no whole number, or too small or too large a one; see `check_type`."""
    is_count = is_integer(value) and least <= value <= most
    if not is_count and not (or_none and value is None):
        at_most = f", at most {most}" if isinstance(value, int) and value > most else ""
        may_be = f"a whole number, at least {least}{at_most}{', or null' if or_none else ''}"
        raise ConfigError(f"{what}: got {name}={value!r:.80}; must be {may_be}: {do}")


def check_number(
    what: str, name: str, value: object, *, least: float | None = None, or_none: bool = False, do: str
) -> None:
    """Refuse what is no finite number, or below `least` where there is one; see `check_type`."""
    is_right = is_number(value) and (least is None or value >= least)
    if not is_right and not (or_none and value is None):
        may_be = "a finite number" if least is None else f"a finite number, at least {least:g}"
        or_null = "" if not or_none else " or null" if least is None else ", or null"
        raise ConfigError(f"{what}: got {name}={value!r:.80}; must be {may_be}{or_null}: {do}")


def check_keys(what: str, record: Mapping[str, object], needed: Iterable[str], *, do: str) -> None:
    """Refuse a record that lacks a key; see `check_type`."""
    lacking = [name for name in needed if name not in record]
    if lacking:
        raise ConfigError(f"{what}: lacks {', '.join(lacking)}; {do}")


def check_schedule(what: str, name: str, value: object, *, do: str) -> None:
    """Refuse what is no list of the first and the last batch size and the length of their drafts; see `check_type`."""
    check_type(what, name, value, list, do=do)
    assert isinstance(value, list), "it was checked"
    for entry in value:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3 or not all(type(one) is int for one in entry):
            raise ConfigError(
                f"{what}: got {name} with {entry!r:.80}; must have a list of three whole numbers there (the first and the last "
                f"batch size, the length of drafts): {do}"
            )
