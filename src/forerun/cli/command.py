"""Makes an app of a function that is a command, with examples at the end of its help."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from cyclopts import App

NARROWEST = 80
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
        if len(f"{rows[-1]} {option} \\") > NARROWEST:
            rows.append(indent + option)
        else:
            rows[-1] += f" {option}"
    return " \\\n".join(rows)
