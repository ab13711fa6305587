"""Finds and reads files of a model folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import ModelError, one_line

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
QUANTIZATION_KEY = "quantization_config"  # of config.json: how the weights are quantized, where they are
GGUF_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MOST_PARTS = 1000
HEADER_LENGTH = 8  # bytes of a safetensors file before its header
MOST_HEADER_BYTES = 100_000_000  # as safetensors has it


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that `path` is, or that holds the only weights of the folder `path`; else None.

    Of a model that is split into parts it is the first.

    Raises:
        ModelError: the folder holds several models.
    """
    if path.suffix == ".gguf" and not path.is_dir():
        return path
    found = sorted(path.glob("*.gguf"))
    if not found or any(path.glob("*.safetensors")):
        return None
    if any(file not in gguf_parts(found[0]) for file in found):
        raise ModelError(
            f"{path}: holds {len(found)} GGUF files ({found[0].name}, {found[1].name}, ...); give the path of one"
        )
    return found[0]


def gguf_parts(path: Path) -> list[Path]:
    """Return the files of a model, in order, by the names that llama.cpp gives to parts: name-00001-of-00003.gguf.

    Raises:
        ModelError: the name is of no such part (the fourth of three).
    """
    named = GGUF_PART.fullmatch(path.name)
    if named is None:
        return [path]
    count, number = int(named["count"]), int(named["number"])
    if not 1 <= number <= count <= MOST_PARTS:
        raise ModelError(
            f"{path}: names itself part {number} of {count}; may be 1 to {count} of at most {MOST_PARTS}; rename the file"
        )
    return [path.with_name(f"{named['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def read_json(file: Path) -> Mapping[str, Any]:
    """Read a JSON object from a model folder.

    Raises:
        ModelError: the file is missing, or does not hold a JSON object.
    """
    if not file.parent.is_dir():
        raise ModelError(f"{file.parent}: there is no such folder; check the path")
    if not file.is_file():
        raise ModelError(f"{file.parent}: not a model folder (no {file.name}); give the folder that holds it")
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file}: not JSON ({one_line(error)}); download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: got a {type(content).__name__}; must be a JSON object; download it again")
    return content


def read_safetensors_header(file: Path) -> dict[str, Any]:
    """Read what a safetensors file says of its tensors, by name, without torch: "dtype", "shape" and "data_offsets" of each.

    Nothing is checked: a damaged file gives other JSON, or any error of reading it.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(HEADER_LENGTH), "little")
        header = json.loads(stream.read(min(length, MOST_HEADER_BYTES)))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}
