"""The commands of the `forerun` program, its exit codes, and how errors are shown."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from cyclopts import App, CycloptsError, UnknownOptionError, UnusedCliTokensError

import forerun
from forerun.cli.help_screen import HelpScreen
from forerun.cli.program import INTERRUPTED
from forerun.cli.whole_numbers import refuse_fractions
from forerun.errors import ForerunError

USAGE_ERROR = 2

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


def build_app() -> App:
    """The program with all its commands."""
    app = App(
        name="forerun",
        help="Text from language models by speculative decoding: exactly the model's own text, sooner.",
        help_epilogue="Start with:\n  forerun demo\n  forerun COMMAND --help",
        help_format="plaintext",
        help_formatter=HelpScreen(),
        version=forerun.__version__,
        config=(refuse_fractions,),
        suppress_keyboard_interrupt=False,
    )
    for name in COMMANDS:
        module = name.replace("-", "_")
        app.command(f"forerun.cli.{module}:{module}", name=name)
    return app


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
        except UnknownOptionError as error:
            return _fail(_misplaced(error, words) or str(error))
        except UnusedCliTokensError as error:
            beyond = shlex.join(error.unused_tokens or [])
            return _fail(
                f"got {beyond} beyond what the command takes; leave it out, or put a text of several words in quotes"
            )
        except (CycloptsError, ForerunError) as error:
            return _fail(str(error), error.exit_code if isinstance(error, ForerunError) else USAGE_ERROR)
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:
            # The reader closed our output: point it elsewhere, so that the flush at exit does not fail too.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except OSError as error:
            return _fail(_located(error))
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int = USAGE_ERROR) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _misplaced(error: UnknownOptionError, words: Sequence[str]) -> str | None:
    """What to say of an option that is unknown only because it stands after --; None where it does not."""
    name = error.token.keyword or error.token.value
    place = next((number for number, word in enumerate(words) if word.partition("=")[0] == name), 0)
    return f"{name}: options go before --; what follows is text" if "--" in words[:place] else None


def _located(error: OSError) -> str:
    """What the system refused, and the file; where an open stream fails, such as standard output, the system names none."""
    what = error.strerror or str(error) or type(error).__name__
    return what if error.filename is None else f"{error.filename}: {what}"


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
