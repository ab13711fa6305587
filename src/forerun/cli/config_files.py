"""Reads `--configs`: speculative configurations, in YAML or JSON, by name or in a list."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.bench.comparison import PLAIN
from forerun.cli.yaml_files import read_yaml
from forerun.config.speculative_config import resolve_speculative
from forerun.errors import ConfigError, ForerunError

EXAMPLE = "name: {method: ngram, num_speculative_tokens: 5}"


def read_configs(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> speculative_config, each checked as far as is possible without a model.

    Those in a list without a `name` are named after what they resolve to ("ngram, K=5").

    Raises:
        ConfigError: the file cannot be read, is not YAML, names one thing twice or holds no configuration.
        ForerunError: a configuration is wrong; the message names it.
    """
    given = read_yaml(path, option="--configs", example=EXAMPLE)
    listed: list[tuple[str | None, Any]] = []
    if isinstance(given, Mapping):
        listed = [(str(name), config) for name, config in given.items()]
    elif isinstance(given, list):
        listed = [_take_name(config) for config in given]
    if not listed:
        raise ConfigError(f"--configs: {path} holds no configuration; write e.g. {EXAMPLE}")
    configs: dict[str, dict[str, Any]] = {}
    for number, (given_name, config) in enumerate(listed, 1):
        where = f"--configs: {path}, {given_name or f'number {number}'}"
        if not isinstance(config, dict):
            raise ConfigError(f"{where}: got {config!r:.80}; must be a speculative_config, e.g. {EXAMPLE}")
        try:
            resolved = resolve_speculative(config)
        except ForerunError as error:
            raise type(error)(f"{where}: {error}") from None
        name = given_name or resolved.describe()
        if name in (*configs, PLAIN):
            raise ConfigError(
                f"{where}: the name {name!r} is taken; give each a name of its own ({PLAIN!r} is decoding without drafts)"
            )
        configs[name] = config
    return configs


def _take_name(config: Any) -> tuple[str | None, Any]:
    """A list's entry as its name, if it has one, and the rest."""
    if not isinstance(config, dict) or "name" not in config:
        return None, config
    return str(config["name"]), {key: value for key, value in config.items() if key != "name"}
