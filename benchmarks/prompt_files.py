"""Reads public prompt sets: source files to edit, and questions to answer."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
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
