"""Files that are whole or not there: what interrupts their writing leaves those of before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The path of a file beside, of the same ending, which takes the place of `path` once it is written.

    Each process has its own, so that of several that write at once the last one's is there in the end. A link stays, and what it
    leads to is written; a pipe or a device, which nothing may take the place of, is given as it is.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        yield path
        return
    part = path.with_name(f"{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield part
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
