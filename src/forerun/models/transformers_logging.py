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
