"""The `forerun` program: its commands, its exit codes, and how errors are shown."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn, TextIO

from cyclopts import App, CycloptsError

import forerun
from forerun.cli import torch_libraries
from forerun.errors import ForerunError

USAGE_ERROR = 2
INTERRUPTED = 130

COMMANDS = (
    "bench",
    "chat",
    "collect-env",
    "demo",
    "deploy",
    "drafters",
    "dynamo-worker",
    "emit",
    "generate",
    "models",
    "plan",
    "pools",
    "profile",
    "serve",
    "simulate",
    "train",
    "tune",
    "tune-kernels",
    "verify",
)
"""The commands: each is an app in a module of its name, which is imported when the command is used or shown."""

COMPUTING = ("chat", "demo", "generate", "serve", "train", "verify")
"""Commands that always import torch."""


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
    for name in COMMANDS:
        module = name.replace("-", "_")
        app.command(f"forerun.cli.{module}:{module}", name=name)
    return app


def program() -> NoReturn:
    """Run `main` as a process of its own, which ends at once.

    Python would take torch's half a million objects apart first, which takes more than half as long as its import.
    """
    code = 1  # of an exception that `main` lets through

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)

    atexit.register(end)  # what registers first runs last, after all other threads have ended
    if any(word in COMPUTING for word in sys.argv[1:2]):
        torch_libraries.begin_opening()
    code = main()
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code: 2 for a mistake of the user, 3 for a lost device, 130 when interrupted."""
    words = sys.argv[1:] if argv is None else argv
    app = build_app()
    with _plain_messages():
        try:
            if not any(word in COMMANDS for word in words):
                app.resolved_commands()  # the list of commands shows the first line of each, which is in its module
            code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
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
    return error.exit_code if isinstance(error, ForerunError) else USAGE_ERROR


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
