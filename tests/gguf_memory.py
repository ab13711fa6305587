"""Builds the tokenizer of a GGUF file, and prints what comes of it: `python -m tests.gguf_memory FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from forerun.errors import ModelError
from forerun.models.gguf.file import open_gguf
from forerun.models.gguf.tokenizer import build_tokenizer


def peak_mb() -> int:
    """The most memory that this process has had; `ru_maxrss` has that of the process that began it, too, and hides what is less."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) // 1024


def main(path: Path) -> None:
    """Print the error, None if there is none, and by how many MB the process has grown."""
    before = peak_mb()
    said = None
    try:
        build_tokenizer(open_gguf(path))
    except ModelError as error:
        said = str(error)
    print(json.dumps({"said": said, "grown_mb": peak_mb() - before}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
