"""Prompts from files: conversations in ShareGPT's format, JSON lines of one's own or as Spec-Bench's."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forerun.bench.load.answer import LoadRequest
from forerun.bench.load.dataset import Dataset
from forerun.bench.sharegpt import MOST_TOKENS, find_fitting, read_conversations
from forerun.errors import ConfigError
from forerun.models.tokenizer import Tokenizer


def read_sharegpt(dataset: Dataset, path: Path, tokenizer: Tokenizer, count: int) -> list[LoadRequest]:
    """Up to `count` first turns of conversations that fit vLLM's limits.

    Raises:
        ConfigError: the file is not in the format, or no conversation fits.
    """
    exchanges = read_conversations(path)
    if not dataset.disable_shuffle:
        random.Random(dataset.seed).shuffle(exchanges)
    found: list[LoadRequest] = []
    for prompt, ids, output_len in find_fitting(
        exchanges, tokenizer.encode, output_len=dataset.answer_len, most_tokens=MOST_TOKENS
    ):
        found.append(LoadRequest(prompt, output_len, len(ids)))
        if len(found) == count:
            break
    if not found:
        raise ConfigError(f"{path}: no conversation of fitting length; give another file")
    return found


def read_custom(dataset: Dataset, path: Path, tokenizer: Tokenizer | None, count: int) -> list[LoadRequest]:
    """Up to `count` prompts of lines with a "prompt" and perhaps "output_tokens".

    Raises:
        ConfigError: a line has no prompt, or no number of tokens where it must say one.
    """
    found: list[tuple[str, int]] = []
    for where, record in _records(path):
        prompt, length = record.get("prompt"), dataset.answer_len
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f'{where}: no text under "prompt"; mend it')
        if length is None:
            length = record.get("output_tokens")
        if type(length) is not int or length < 1:
            raise ConfigError(f'{where}: no number above 0 under "output_tokens"; mend it or give custom_output_len')
        found.append((prompt, length))
    return _lay_out(dataset, found, tokenizer, count)


def read_spec_bench(dataset: Dataset, path: Path, tokenizer: Tokenizer | None, count: int) -> list[LoadRequest]:
    """Up to `count` first turns of questions, of the dataset's category where it names one.

    Raises:
        ConfigError: a line has no turns, or no question is of that category.
    """
    prompts: list[str] = []
    categories: set[str] = set()
    for where, record in _records(path):
        turns, category = record.get("turns"), str(record.get("category"))
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise ConfigError(f'{where}: no list of texts under "turns"; mend it')
        categories.add(category)
        if dataset.spec_bench_category in (None, category):
            prompts.append(turns[0])
    if not prompts:
        known = ", ".join(sorted(categories))
        raise ConfigError(f"spec_bench_category: got {dataset.spec_bench_category!r}; {path} has {known}")
    return _lay_out(dataset, [(prompt, dataset.answer_len or 1) for prompt in prompts], tokenizer, count)


def _lay_out(
    dataset: Dataset, prompts: list[tuple[str, int]], tokenizer: Tokenizer | None, count: int
) -> list[LoadRequest]:
    """Shuffled prompts, as a user's message in token ids where there is a tokenizer with a template.

    Token ids, as the template writes out the token that begins a text: a server would put another before it.
    """
    if not dataset.disable_shuffle:
        random.Random(dataset.seed).shuffle(prompts)
    requests = []
    for prompt, output_len in prompts[:count]:
        if tokenizer is None:
            requests.append(LoadRequest(prompt, output_len))
        elif tokenizer.has_chat_template:
            ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
            requests.append(LoadRequest(ids, output_len, len(ids)))
        else:
            requests.append(LoadRequest(prompt, output_len, len(tokenizer.encode(prompt))))
    return requests


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each line stands, and the object that it is.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is no JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset_path: cannot read {path} ({error}); give a file of JSON lines") from error
    if not any(map(str.strip, lines)):
        raise ConfigError(f"dataset_path: {path} is empty; give a file of JSON lines")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON ({error}); write one object per line") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{where}: got a {type(record).__name__}; must be an object")
        yield where, record
