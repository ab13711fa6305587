"""Reads the files that options name: prompts as text or JSON lines, configurations of drafters, other YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from forerun.errors import ConfigError, ForerunError

Prompt = str | list[dict[str, str]]
"""A text, or a conversation as a list of messages."""

CONFIG_EXAMPLE = "name: {method: ngram, num_speculative_tokens: 5}"


def read_kinds(paths: Sequence[Path]) -> dict[str, list[Prompt]]:
    """The prompts of each file, by the file's name without its ending.

    Raises:
        ConfigError: two files have the same name, or a file cannot be read or holds no prompt.
    """
    kinds: dict[str, list[Prompt]] = {}
    for path in paths:
        if path.stem in kinds:
            raise ConfigError(f"--prompts: two files are called {path.stem}, as their prompts would be; rename one")
        kinds[path.stem] = read_prompts(path)
    return kinds


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a .jsonl file, or the lines of a .txt file.

    Raises:
        ConfigError: the file cannot be read, has another ending, or holds no prompt.
    """
    if path.suffix not in (".jsonl", ".txt"):
        raise ConfigError(f"--prompts: got {path}; must end in .jsonl, or in .txt with one prompt per line")
    lines = read_lines(path)
    if path.suffix == ".txt":
        return [*lines]
    return [_json_prompt(line, where=f"{path}, prompt {number}") for number, line in enumerate(lines, 1)]


def read_lines(path: Path) -> list[str]:
    """The non-empty lines of a file.

    Raises:
        ConfigError: the file cannot be read or holds no prompt.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--prompts: cannot read {path} ({error}); give a text file with one prompt per line"
        ) from None
    if not lines:
        raise ConfigError(f"--prompts: {path} holds no prompt; write one per line")
    return lines


def _json_prompt(line: str, *, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--prompts: {where} is not JSON ({error}); write one object per line") from None
    found = _text(record) or _question(record)
    if not found:
        raise ConfigError(
            f'--prompts: {where} must be an object with a text under "prompt" or "question", a list of texts under "turns", '
            'or of {"role": ..., "content": ...} under "messages"'
        )
    return found


def _text(record: Any) -> str | None:
    """The text under "prompt" or "question", or the first under "turns"."""
    if not isinstance(record, dict):
        return None
    turns = record.get("turns")
    texts = (record.get("prompt"), record.get("question"), *(turns[:1] if isinstance(turns, list) else ()))
    return next((text for text in texts if isinstance(text, str) and text), None)


def _question(record: Any) -> list[dict[str, str]] | None:
    """The conversation under "messages", without the answer that it may end with."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        return None
    return messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
    )


def read_configs(path: Path) -> dict[str, dict[str, Any]]:
    """Read a file of configurations, by name or in a list, and check what can be checked without a model.

    Returns name -> speculative_config; a listed configuration without a `name` gets its description,
    e.g. "ngram, K=5".

    Raises:
        ConfigError: the file cannot be read, is not YAML, has a name twice or holds no configuration.
        ForerunError: a configuration is wrong; the message names it.
    """
    from forerun.bench.outcomes import PLAIN  # torch: only when it is needed
    from forerun.config.speculative_config import AUTO, resolve_speculative
    from forerun.plan.profile import with_underscores

    given = read_yaml(path, option="--configs", example=CONFIG_EXAMPLE)
    listed: list[tuple[str | None, Any]] = []
    if isinstance(given, Mapping):
        listed = [(str(name), config) for name, config in given.items()]
    elif isinstance(given, list):
        listed = [_take_name(config) for config in given]
    if not listed:
        raise ConfigError(f"--configs: {path} holds no configuration; write e.g. {CONFIG_EXAMPLE}")
    configs: dict[str, dict[str, Any]] = {}
    for number, (given_name, entry) in enumerate(listed, 1):
        config = {"method": AUTO} if entry == AUTO else entry
        where = f"--configs: {path}, {given_name or f'number {number}'}"
        if not isinstance(config, dict):
            raise ConfigError(f"{where}: got {config!r:.80}; must be a speculative_config, e.g. {CONFIG_EXAMPLE}")
        try:
            resolved = resolve_speculative(config)
        except ForerunError as error:
            raise type(error)(f"{where}: {error}") from None
        name = given_name or resolved.describe()
        if name in (*configs, PLAIN):
            raise ConfigError(
                f"{where}: the name {name!r} is taken; give each a name of its own ({PLAIN!r} is decoding without drafts)"
            )
        configs[name] = with_underscores(config)
    return configs


def _take_name(config: Any) -> tuple[str | None, Any]:
    """Split an entry of a list into its name, or None, and the configuration."""
    if not isinstance(config, dict) or "name" not in config:
        return None, config
    return str(config["name"]), {key: value for key, value in config.items() if key != "name"}


def read_yaml(path: Path, *, option: str, example: str) -> Any:
    """The content of a file of YAML or JSON that `option` names; error messages show `example`.

    Raises:
        ConfigError: the file cannot be read, is not YAML, is nested too deeply or has a key twice in one mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: cannot read {path} ({error}); give a YAML or JSON file") from None
    try:
        _refuse_duplicate_keys(yaml.compose(text, Loader=yaml.SafeLoader), path, option)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{option}: {path} is neither YAML nor JSON ({error}); write e.g. {example}") from None
    except RecursionError:
        raise ConfigError(
            f"{option}: {path} is nested too deeply, as where an alias stands within what it names; write e.g. {example}"
        ) from None


def _refuse_duplicate_keys(node: Any, path: Path, option: str) -> None:
    """Refuse a key that occurs twice, of which PyYAML would silently keep the last value."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        for key, value in node.value:
            if keys.count(key.value) > 1:
                raise ConfigError(f"{option}: {path} has the key {key.value!r} twice in one place; keep one")
            _refuse_duplicate_keys(value, path, option)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_duplicate_keys(value, path, option)
