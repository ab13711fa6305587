"""Hostile GGUF files: an error of one line each, no crash, little memory. tests/slow does it 20,000 times."""

import json
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ModelError
from forerun.models.gguf.header import read_header

MOST_MB = 256


def fuzz(folder, first, last, *, timeout):
    """What came of the files with seeds [first, last), read by a process of their own."""
    command = [sys.executable, "-m", "tests.gguf_fuzz", str(folder), str(first), str(last)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_mutated_files_are_read_or_refused_in_little_memory(tmp_path):
    found = fuzz(tmp_path, 0, 300, timeout=120)
    assert found["read"] + found["refused"] == 300
    assert found["refused"] > 100
    assert found["grown_mb"] < MOST_MB


@settings(max_examples=200)
@given(content=st.binary(max_size=400))
def test_any_bytes_after_the_magic_are_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + content)
    said = ""
    try:
        read_header(path)
    except ModelError as error:
        said = str(error)
    assert "\n" not in said
