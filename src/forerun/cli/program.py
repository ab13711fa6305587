"""The `forerun` program as a process, which begins and ends sooner than Python alone would let it."""

from __future__ import annotations

import atexit
import io
import os
import sys
from contextlib import suppress
from typing import NoReturn

from forerun.cli import torch_libraries
from forerun.cli.torch_meta_kernels import leave_out_meta_kernels

COMPUTING = ("chat", "demo", "generate", "serve", "train", "verify")
"""Commands that always import torch."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it: 128 and the signal's number."""


def program() -> NoReturn:
    """Run `app.main` as a process of its own, which ends at once.

    Python would take torch's half a million objects apart first, which takes more than half as long as its import.
    """
    _open_streams()
    code = 1  # of an exception that `main` lets through

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)

    atexit.register(end)  # what registers first runs last, after all other threads have ended
    try:
        if any(word in COMPUTING for word in sys.argv[1:2]):
            leave_out_meta_kernels()
            torch_libraries.begin_opening()
        from forerun.cli.app import main  # only now: its imports take as long as the libraries

        code = main()
    except KeyboardInterrupt:  # before `main` could take it
        code = INTERRUPTED
    sys.exit(code)


def _open_streams() -> None:
    """Let a stream that is closed lead nowhere, and none of them fail at a character that its encoding lacks."""
    streams = (("stdin", "r", "surrogateescape"), ("stdout", "w", "replace"), ("stderr", "w", "backslashreplace"))
    for name, mode, errors in streams:
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8", errors=errors))  # noqa: SIM115 - to the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
