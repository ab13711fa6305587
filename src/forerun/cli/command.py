"""Makes an app of a command that is one function, so that its module need not be imported before it is used."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from cyclopts import App


def command(function: Callable[..., Any]) -> App:
    """An app named after the function; its help shows the examples at the end of the docstring last."""
    _, _, examples = (inspect.getdoc(function) or "").partition("\nExamples:\n")
    app = App(
        name=function.__name__.replace("_", "-"),
        help_epilogue=f"Examples:\n{examples}" if examples else "",
    )
    app.default(function)
    return app
