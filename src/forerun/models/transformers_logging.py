"""Silences transformers while it loads models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' progress bars, its warnings and its logs below errors inside the block.

    What it prints on loading (load reports, progress, hints to its own API) either becomes an error of
    forerun's or does not concern the user. The settings are the process's, and are restored at the end.
    """
    from transformers.utils import logging  # here: importing transformers takes 100 MB

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
