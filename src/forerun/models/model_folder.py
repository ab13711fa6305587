"""Finds and reads files of a model folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import ModelError, one_line

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that `path` is, or that holds the only weights of the folder `path`; else None.

    Raises:
        ModelError: the folder holds several.
    """
    if path.suffix == ".gguf":
        return path
    found = sorted(path.glob("*.gguf"))
    if not found or any(path.glob("*.safetensors")):
        return None
    if len(found) > 1:
        raise ModelError(
            f"{path}: holds {len(found)} GGUF files ({found[0].name}, {found[1].name}, ...); give the path of one"
        )
    return found[0]


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
