"""Reads public prompt sets: source files to edit, and questions to answer.

Run: python -m benchmarks.prompt_files FOLDER NUMBER > code-edit.jsonl
It writes wishes to rename a function of FOLDER's files, as prompts for `forerun bench compare` and `replay`.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

FUNCTION = re.compile(r"^def (\w{4,})\(", re.MULTILINE)
"""Matches a function of a source file, which prompts ask to rename."""


def source_files(folder: Path) -> Iterator[str]:
    """Contents of all .py files of a folder, and of .jsonl.gz files whose lines have a "code"."""
    for file in folder.rglob("*.py"):
        yield file.read_text(encoding="utf-8")
    for archive in folder.glob("*.jsonl.gz"):
        with gzip.open(archive, "rt", encoding="utf-8") as lines:
            yield from (json.loads(line)["code"] for line in lines)


def first_turns(file: Path) -> list[str]:
    """The first of each line's "turns", the format of MT-Bench and Spec-Bench."""
    return [json.loads(line)["turns"][0] for line in file.read_text(encoding="utf-8").splitlines()]


def rename_wishes(folder: Path) -> Iterator[str]:
    """Wishes to rename one function of a short file, each with the file, in random order."""
    files = sorted(source_files(folder))
    random.Random(0).shuffle(files)
    for code in files:
        found = FUNCTION.search(code)
        if found is not None and 400 < len(code) < 1500:
            yield (
                f"Rename the function {found[1]} to new_{found[1]} in this file. "
                f"Answer with the whole file and nothing else.\n\n```python\n{code}```"
            )


def main() -> None:
    """Write prompts as JSON lines."""
    folder, number = sys.argv[1:]
    for wish in islice(rename_wishes(Path(folder)), int(number)):
        print(json.dumps({"prompt": wish}))


if __name__ == "__main__":
    main()
