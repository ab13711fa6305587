"""Runs the documentation: Python blocks are executed, shell blocks are checked against the real commands.

A tiny random model stands in for the default one, so that no page needs a download.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from sybil import Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parent


def check_shell(example):
    """Each `forerun` line must parse, each `make` target must exist, each script must be there."""
    from forerun.cli.app import build_app

    for line in example.parsed.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words[:1] == ["forerun"]:
            build_app().parse_args(words[1:], exit_on_error=False, print_error=False)
        elif words[:1] == ["make"]:
            targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M)
            assert all(w in targets for w in words[1:] if "=" not in w), f"no such make target: {line}"
        elif words[:1] == ["python"] and words[1] != "-m":
            assert (ROOT / words[1]).exists(), f"no such script: {line}"


def stand_in_model(namespace):
    """Put a tiny random model where the default one would be."""
    from tests.stand_in import make_stand_in_cache

    folder = tempfile.mkdtemp(prefix="forerun-docs-")
    make_stand_in_cache(Path(folder))
    os.environ["FORERUN_CACHE"] = namespace["stand_in_cache"] = folder


def remove_stand_in_model(namespace):
    """Remove what `stand_in_model` has made."""
    shutil.rmtree(namespace["stand_in_cache"])


pytest_collect_file = Sybil(
    parsers=[
        SkipParser(),
        PythonCodeBlockParser(),
        CodeBlockParser("bash", check_shell),
        CodeBlockParser("console", check_shell),
    ],
    patterns=["README.md", "docs/*.md", "docs/*/*.md"],
    setup=stand_in_model,
    teardown=remove_stand_in_model,
).pytest()
