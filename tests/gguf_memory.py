"""Builds the tokenizer of a GGUF file, and prints what comes of it: `python -m tests.gguf_memory FILE`."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from forerun.errors import ModelError
from forerun.models.gguf.file import open_gguf
from forerun.models.gguf.tokenizer import build_tokenizer


def main(path: Path) -> None:
    """Print the error, None if there is none, and by how many MB the process has grown."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = None
    try:
        build_tokenizer(open_gguf(path))
    except ModelError as error:
        said = str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"said": said, "grown_mb": grown // 1024}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
