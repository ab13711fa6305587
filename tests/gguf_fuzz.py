"""Loads mutated GGUF files and computes with them, and counts what comes of it: `python -m tests.gguf_fuzz FOLDER FIRST LAST`."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from forerun.errors import ModelError
from forerun.models.base import choose_attention
from forerun.models.decoder import build_decoder
from forerun.models.gguf.architectures import architecture_of, unknown_architecture
from forerun.models.gguf.checkpoint import GGUFCheckpoint
from forerun.models.gguf.config import config_of
from forerun.models.gguf.file import open_gguf
from forerun.models.gguf.tokenizer import build_tokenizer, chat_template
from forerun.models.model_folder import gguf_parts
from forerun.models.packing import Packing
from forerun.ops.native.library import load_kernels
from tests.family_gguf import FAMILY_GGUFS, save_family
from tests.gguf_bytes import mutated
from tests.gguf_memory import peak_mb
from tests.models.paged_run import PagedRun
from tests.tiny_gguf import save_tiny_gguf

HEADER_BYTES = 1200  # where the keys are; the vocabulary and the tensors' places follow
CPU = torch.device("cpu")
TOKEN_IDS = (5, 9, 17, 3, 44)
Whole = list[bytes]  # the parts of a model

BLOCKS = (["Q8_0"], ["Q4_0", "Q4_1", "Q5_0", "Q5_1"], ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
OTHER_BLOCKS = (["IQ4_NL", "IQ4_XS", "MXFP4"], ["IQ2_XXS", "IQ3_S", "IQ1_M", "TQ2_0", "NVFP4"], ["Q8_0", "BF16", "F16"])
WITH_PIECES = ("llama", "phi3", "gemma2", "gemma3")


def read_whole(path: Path, *, row_bits: int = 0) -> None:
    """Read everything that a file holds, but with no help from transformers; pack its weights, and compute a few rows.

    `row_bits`: see `rounding_rows`.

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
    kernels = load_kernels()
    dtype = torch.bfloat16 if kernels and config.dtype == torch.bfloat16 else torch.float32
    packing = Packing.choose(kernels, dtype=dtype, row_bits=row_bits) if kernels else None
    model = build_decoder(config, GGUFCheckpoint(file, row), dtype=dtype, device=CPU, packing=packing)
    run = PagedRun(model, attention=choose_attention(model.kv_specs, kernels))
    run.feed([token_id % model.vocab_size for token_id in TOKEN_IDS], num_candidates=1)


def whole_files(folder: Path) -> Iterator[Whole]:
    """Models of every kind of vocabulary, blocks and architecture, with every kind of rope, and one in parts."""
    for number, kinds in enumerate(([], *BLOCKS, *OTHER_BLOCKS)):
        path = folder / f"{number}.gguf"
        save_tiny_gguf(path, kinds=kinds)
        yield [path.read_bytes()]
    for number, kind in enumerate(FAMILY_GGUFS):
        yield [save_family(folder / f"family-{number}", kind).read_bytes()]
    for kind in WITH_PIECES:
        yield [save_family(folder / f"pieces-{kind}", kind, has_pieces=True).read_bytes()]
    save_tiny_gguf(folder / "split.gguf", tensors_per_part=8)
    yield [part.read_bytes() for part in sorted(folder.glob("split-*.gguf"))]


def written(whole: Whole, folder: Path) -> list[Path]:
    """Write a model, and return where its parts are."""
    name = "m.gguf" if len(whole) == 1 else f"m-00001-of-{len(whole):05d}.gguf"
    paths = gguf_parts(folder / name)
    for path, content in zip(paths, whole, strict=True):
        path.write_bytes(content)
    return paths


def outcome(whole: Whole, seed: int, folder: Path) -> str:
    """Read one model of which a part is mutated: "read", or "refused" in one line.

    Raises:
        AssertionError: the error is more than a line.
    """
    paths = written(whole, folder)
    source = random.Random(seed)
    damaged = source.randrange(len(whole))
    header_bytes = HEADER_BYTES if source.random() < 0.5 else len(whole[damaged])
    paths[damaged].write_bytes(mutated(whole[damaged], seed, header_bytes=header_bytes))
    try:
        read_whole(paths[0], row_bits=(0, 8, 16)[seed % 3])
    except ModelError as error:
        said = str(error)
        assert "\n" not in said, said
        assert len(said) < 2000, said
        return "refused"
    return "read"


def main(folder: Path, first: int, last: int) -> None:
    """Print how many files were read and refused, and by how many MB the process has grown meanwhile."""
    torch.set_num_threads(1)  # and so the kernels': more would wait for each other longer than such models take
    wholes = list(whole_files(folder))
    for whole in wholes:
        read_whole(written(whole, folder)[0])  # which imports and allocates what is needed once
    before = peak_mb()
    counts = Counter(outcome(wholes[seed % len(wholes)], seed, folder) for seed in range(first, last))
    print(json.dumps({**counts, "kinds": len(wholes), "grown_mb": peak_mb() - before}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
