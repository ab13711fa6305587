"""Keeps what transformers prints for its own users away from ours."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, warnings or logs below errors from transformers inside the block.

    What it prints on loading (load reports, progress, hints to its own API) either becomes one of our
    errors or does not concern the user. The settings are the process's; they are put back at the end.
    """
    from transformers.utils import logging  # here, for who asks for it has paid for transformers

    verbosity, progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if progress:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def one_line(error: BaseException) -> str:
    """The first line of an error's text, for an error of our own; its type if it has no text.

    A line that ends in a colon takes the next one with it; a mere key is shown with the type.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"KeyError: {lines[0]}"
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return first.rstrip(".")
