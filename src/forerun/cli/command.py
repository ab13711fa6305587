"""Makes an app of a command that is one function, so that its module need not be imported before it is used."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, get_args

from cyclopts import App, Token
from cyclopts.argument import ArgumentCollection

from forerun.errors import ConfigError

WIDTH = 80
"""Columns of the narrowest terminal, which breaks what is longer anywhere."""


def command(function: Callable[..., Any]) -> App:
    """An app named after the function; its help shows the examples at the end of the docstring last."""
    _, _, shown = (inspect.getdoc(function) or "").partition("\nExamples:\n")
    app = App(
        name=function.__name__.replace("_", "-"),
        help_epilogue=examples(shown) if shown else "",
    )
    app.default(function)
    return app


def examples(lines: str) -> str:
    """The end of a help screen: commands, long ones broken before options, so that they can be copied."""
    return "Examples:\n" + "\n".join(map(_broken, lines.splitlines()))


def _broken(line: str) -> str:
    first, *options = re.split(r"(?<=\S) (?=--)", line)
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    rows = [first]
    for option in options:
        if len(f"{rows[-1]} {option} \\") > WIDTH:
            rows.append(indent + option)
        else:
            rows[-1] += f" {option}"
    return " \\\n".join(rows)


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
