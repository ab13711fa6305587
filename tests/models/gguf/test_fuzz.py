"""Hostile GGUF files: an error of one line each, no crash, little memory. tests/slow does it 20,000 times."""

import itertools
import json
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ModelError
from forerun.models.gguf.header import read_header
from tests.gguf_bytes import ARRAY, F32, I32, STRING, Key, gguf_bytes

MOST_MB = 256


def fuzz(folder, first, last, *, timeout):
    """What came of the files with seeds [first, last), read by a process of their own."""
    command = [sys.executable, "-m", "tests.gguf_fuzz", str(folder), str(first), str(last)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_mutated_files_are_read_or_refused_in_little_memory(tmp_path):
    found = fuzz(tmp_path, 0, 400, timeout=120)
    assert found["read"] + found["refused"] == 400
    assert found["read"] > 40
    assert found["refused"] > 150
    assert found["grown_mb"] < MOST_MB


def all_parts_of(texts):
    return list(
        dict.fromkeys(text[i:j] for text in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1))
    )


VOCABULARIES = {
    "a token of megabytes": (lambda: ["<unk>", "b", "a" * 16_000_000], "has a token of 16000000 characters"),
    "tokens of half a kilobyte": (lambda: ["<unk>", *(f"{i:0512}" for i in range(30_000))], None),
    "ever longer tokens": (lambda: ["<unk>", *("a" * length for length in range(1, 5000))], "has a token of 4999"),
    "all parts of some texts": (
        lambda: ["<unk>", *all_parts_of("".join(random.Random(i).choices("abcd", k=280)) for i in range(4))],
        "put together in more than 1048576 ways",
    ),
    "too many bytes": (lambda: ["<unk>", *(f"{i:0200}" for i in range(90_000))], "strings in 16777216 bytes"),
    "too many tokens": (lambda: ["a"] * ((1 << 20) + 1), "has 1048577 tokens, 0 of them special, and 0 merges"),
}


LIKE_OTHERS = ("a token of megabytes", "ever longer tokens", "too many bytes")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in LIKE_OTHERS else ()) for kind in VOCABULARIES]
)
def test_a_hostile_vocabulary_takes_little_memory(tmp_path, kind):
    make, said = VOCABULARIES[kind]
    words = make()
    found = built(tmp_path / "x.gguf", words, Key("tokenizer.ggml.scores", ARRAY, [0.0] * len(words), F32))
    assert (found["said"] is None) == (said is None)
    assert said is None or said in found["said"]
    assert found["grown_mb"] < MOST_MB


LARGEST = {
    "words": lambda: ([f"{i:x}" for i in range(639_000)], 0, 1),
    "special tokens": lambda: ([f"{i:x}" for i in range(213_000)], 0, 3),
    "merges": lambda: (
        ["".join(word) for n in range(1, 9) for word in itertools.product("abcd", repeat=n)],
        1 << 20,
        1,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("most", LARGEST)
def test_the_largest_vocabularies_that_are_built_take_little_memory(tmp_path, most):
    words, num_merges, kind = LARGEST[most]()
    merges = [f"{word[:i]} {word[i:]}" for word in words if num_merges for i in range(1, len(word))]
    merges += ["a b"] * (num_merges - len(merges))
    found = built(
        tmp_path / "x.gguf",
        words,
        Key("tokenizer.ggml.merges", ARRAY, merges, STRING),
        Key("tokenizer.ggml.token_type", ARRAY, [kind] * len(words), I32),
    )
    assert found["said"] is None
    assert found["grown_mb"] < MOST_MB


def built(path, words, *keys):
    """What came of building a tokenizer in a process of its own."""
    named = Key("general.architecture", STRING, "llama"), Key("tokenizer.ggml.model", STRING, "llama")
    path.write_bytes(gguf_bytes([*named, Key("tokenizer.ggml.tokens", ARRAY, words, STRING), *keys]))
    command = [sys.executable, "-m", "tests.gguf_memory", str(path)]
    environment = os.environ | {"FORERUN_PACKED_CACHE_GB": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


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
