"""The `forerun` program: its commands, its exit codes, and how errors are shown."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from cyclopts import App, CycloptsError

import forerun
from forerun.cli.bench import bench
from forerun.cli.chat import chat
from forerun.cli.collect_env import collect_env
from forerun.cli.demo import demo
from forerun.cli.drafters import drafters
from forerun.cli.generate import generate
from forerun.cli.models import models
from forerun.cli.pools import pools
from forerun.cli.serve import serve
from forerun.cli.train import train
from forerun.cli.verify import verify
from forerun.errors import ForerunError

USAGE_ERROR = 2
INTERRUPTED = 130

COMMANDS: tuple[App | Callable[..., Any], ...] = (
    bench,
    chat,
    collect_env,
    demo,
    drafters,
    generate,
    models,
    pools,
    serve,
    train,
    verify,
)


def build_app() -> App:
    """The program with all its commands."""
    app = App(
        name="forerun",
        help="Text from language models by speculative decoding: exactly the model's own text, sooner.",
        help_epilogue="Start with:\n  forerun demo\n  forerun COMMAND --help",
        help_format="plaintext",
        version=forerun.__version__,
        suppress_keyboard_interrupt=False,
    )
    for command in COMMANDS:
        if isinstance(command, App):
            app.command(command)
        else:
            app.command(command, help_epilogue=_examples(command))
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code: 2 for a mistake of the user, 130 when interrupted."""
    with _plain_messages():
        try:
            code = build_app()(argv, exit_on_error=False, print_error=False, result_action="return_value")
            sys.stdout.flush()
        except (CycloptsError, ForerunError) as error:
            return _fail(error)
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:
            # The reader closed our output: point it elsewhere, so that the flush at exit does not fail too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
    return code if isinstance(code, int) else 0


def _fail(error: Exception) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return USAGE_ERROR


def _examples(command: Callable[..., Any]) -> str:
    """The examples at the end of a command's docstring, which the help shows last."""
    _, _, examples = (inspect.getdoc(command) or "").partition("\nExamples:\n")
    return f"Examples:\n{examples}" if examples else ""


@contextmanager
def _plain_messages() -> Iterator[None]:
    """Print each of forerun's log messages and warnings as one line on stderr."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("forerun")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    finally:
        logger.removeHandler(handler)


def _show_warning(
    message: Warning | str,
    category: type[Warning],  # noqa: ARG001
    filename: str,  # noqa: ARG001
    lineno: int,  # noqa: ARG001
    file: TextIO | None = None,  # noqa: ARG001
    line: str | None = None,  # noqa: ARG001
) -> None:
    print(f"warning: {message}", file=sys.stderr)
