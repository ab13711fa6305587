"""Whole numbers on the command line: several with commas between them, and none of them a fraction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, get_args

from cyclopts import App, Parameter, Token
from cyclopts.argument import ArgumentCollection

from forerun.errors import ConfigError


def parse_numbers(_hint: type[Any], tokens: Sequence[Token]) -> tuple[int, ...]:
    """Read numbers with commas between them.

    Raises:
        ValueError: one of them is no whole number.
    """
    text = tokens[0].value
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"got {text!r}; must be whole numbers with commas between them, e.g. 1,2,4") from None


def show_numbers(numbers: Sequence[int]) -> str:
    """Numbers in the form of the command line."""
    return ",".join(map(str, numbers))


Numbers = Annotated[
    tuple[int, ...], Parameter(converter=parse_numbers, n_tokens=1, negative=(), show_default=show_numbers)
]
"""Several, e.g. 1,2,4."""


def refuse_fractions(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse 2.5 where a whole number is asked for; cyclopts would round it.

    Raises:
        ConfigError: an option has such a value, on the command line or elsewhere.
    """
    for argument in arguments:
        if int in (argument.hint, *get_args(argument.hint)):
            for token in filter(_is_fraction, argument.tokens):
                raise ConfigError(f"{argument.name}: got {token.value}; must be a whole number")


def _is_fraction(token: Token) -> bool:
    """Whether the value is a number, and no whole one."""
    try:
        return not float(token.value).is_integer()
    except ValueError:
        return False  # no number at all, which cyclopts says
