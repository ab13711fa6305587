"""Reads what an option names as a file of YAML or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from forerun.errors import ConfigError


def read_yaml(path: Path, *, option: str, example: str) -> Any:
    """The file's only document; `example` is shown where it is none.

    Raises:
        ConfigError: the file cannot be read, is not YAML or has a key twice in one place.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: cannot read {path} ({error}); give a YAML or JSON file") from None
    try:
        _refuse_twins(yaml.compose(text, Loader=yaml.SafeLoader), path, option)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{option}: {path} is neither YAML nor JSON ({error}); write e.g. {example}") from None


def _refuse_twins(node: Any, path: Path, option: str) -> None:
    """YAML's reader keeps the last of two equal keys and says nothing."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        for key, value in node.value:
            if keys.count(key.value) > 1:
                raise ConfigError(f"{option}: {path} has the key {key.value!r} twice in one place; keep one")
            _refuse_twins(value, path, option)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_twins(value, path, option)
