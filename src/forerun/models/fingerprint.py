"""Which model it is: a short name of its weights and vocabulary, for files that fit one model only."""

from __future__ import annotations

import hashlib
from pathlib import Path

from forerun.models.model_folder import gguf_parts

WEIGHTS = (".safetensors", ".gguf", ".bin")
DESCRIPTIONS = ("config.json", "tokenizer.json")
NUM_SAMPLES = 16  # of each file of weights
SAMPLE_BYTES = 4096


def fingerprint_of_files(path: Path) -> str:
    """The fingerprint of a model's folder or GGUF file with all its parts.

    Configuration and tokenizer count whole. Of weights, which are gigabytes, size and samples throughout each
    file do, so that a model trained further is another one. Names and dates of files do not count.
    """
    digest = hashlib.sha256()
    files = sorted(path.iterdir()) if path.is_dir() else gguf_parts(path)
    for file in files:
        if file.name in DESCRIPTIONS:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        elif file.suffix in WEIGHTS and file.is_file():  # no link that leads nowhere
            digest.update(samples_of(file))
    return digest.hexdigest()


def samples_of(file: Path) -> bytes:
    """A digest of a file's size and of pieces at equal distances, its beginning and its end among them."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for i in range(NUM_SAMPLES):
            stream.seek(max(0, size - SAMPLE_BYTES) * i // (NUM_SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.digest()
