"""Reads mutated GGUF files whole, and counts what comes of it: `python -m tests.gguf_fuzz FOLDER FIRST LAST`."""

from __future__ import annotations

import json
import resource
import sys
from collections import Counter
from pathlib import Path

import torch

from forerun.errors import ModelError
from forerun.models.decoder import build_decoder
from forerun.models.gguf.architectures import architecture_of, unknown_architecture
from forerun.models.gguf.checkpoint import GGUFCheckpoint
from forerun.models.gguf.config import config_of
from forerun.models.gguf.file import open_gguf
from forerun.models.gguf.tokenizer import build_tokenizer, chat_template
from tests.gguf_bytes import mutated
from tests.tiny_gguf import save_tiny_gguf

HEADER_BYTES = 1200  # where the keys are; the vocabulary and the tensors' places follow
CPU = torch.device("cpu")


def read_whole(path: Path) -> None:
    """Read everything that a file holds, but with no help from transformers.

    Raises:
        ModelError: it cannot be read; nothing else may be raised.
    """
    file = open_gguf(path)
    row = architecture_of(file)
    if row is None:
        raise unknown_architecture(file)
    config = config_of(file, row)
    build_tokenizer(file)
    chat_template(file)
    build_decoder(config, GGUFCheckpoint(file, row), dtype=torch.float32, device=CPU)


def outcome(whole: bytes, seed: int, folder: Path) -> str:
    """Read one mutated file: "read", or "refused" in one line.

    Raises:
        AssertionError: the error is more than a line that names the file.
    """
    path = folder / "mutated.gguf"
    header_bytes = HEADER_BYTES if seed % 2 else len(whole)
    path.write_bytes(mutated(whole, seed, header_bytes=header_bytes))
    try:
        read_whole(path)
    except ModelError as error:
        said = str(error)
        assert "\n" not in said, said
        assert len(said) < 2000, said
        return "refused"
    return "read"


def main(folder: Path, first: int, last: int) -> None:
    """Print how many files were read and refused, and by how many MB the process has grown meanwhile."""
    wholes = []
    for quantized in (False, True):
        save_tiny_gguf(folder / "tiny.gguf", quantized=quantized)
        wholes.append((folder / "tiny.gguf").read_bytes())
    read_whole(folder / "tiny.gguf")  # what is imported and allocated once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    counts = Counter(outcome(wholes[seed % 3 % 2], seed, folder) for seed in range(first, last))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({**counts, "grown_mb": grown // 1024}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
