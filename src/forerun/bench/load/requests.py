"""The requests of a dataset: prompts read from a file, or made of random tokens."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from forerun.bench.load.answer import LoadRequest
from forerun.bench.load.workload import Dataset
from forerun.bench.sharegpt import MAX_TOKENS, find_fitting, read_conversations
from forerun.errors import ConfigError
from forerun.models.tokenizer import REPLACEMENT, Tokenizer

logger = logging.getLogger(__name__)

MAX_TRIES = 10


def draw_requests(dataset: Dataset, tokenizer: Tokenizer | None, count: int) -> list[LoadRequest]:
    """Draw `count` requests; a file with fewer prompts has some repeated, unless the dataset forbids it.

    Args:
        dataset: what to draw from. With its seed, a larger `count` gives the same requests and more.
        tokenizer: the model's; None where the dataset needs none.
        count: requests to draw.

    Raises:
        ConfigError: the file cannot be used, or lengths do not fit.
    """
    requests = _draw(dataset, tokenizer, count)
    missing = count - len(requests)
    if missing > 0 and not dataset.no_oversample:
        logger.warning("%s has %d fitting prompts: %d are sent again", dataset.dataset_path, len(requests), missing)
        requests += random.Random(dataset.seed).choices(requests, k=missing)
    return requests


def _draw(dataset: Dataset, tokenizer: Tokenizer | None, count: int) -> list[LoadRequest]:
    """Draw up to `count` requests, by the dataset's name."""
    path = dataset.dataset_path
    if path is not None and dataset.dataset_name == "custom":
        return _read_custom(dataset, path, tokenizer, count)
    if path is not None and dataset.dataset_name == "spec_bench":
        return _read_spec_bench(dataset, path, tokenizer, count)
    if tokenizer is None:
        raise ConfigError(
            f"tokenizer: missing; {dataset.dataset_name} prompts are made with the model's; give --tokenizer"
        )
    if path is not None:
        return _read_sharegpt(dataset, path, tokenizer, count)
    if dataset.dataset_name == "random":
        return _draw_random(dataset, tokenizer, count)
    return _draw_prefix_repetition(dataset, tokenizer, count)


def _read_sharegpt(dataset: Dataset, path: Path, tokenizer: Tokenizer, count: int) -> list[LoadRequest]:
    """The first turns of up to `count` conversations that fit vLLM's limits.

    Raises:
        ConfigError: the file is not in the format, or no conversation fits.
    """
    exchanges = read_conversations(path)
    if not dataset.disable_shuffle:
        random.Random(dataset.seed).shuffle(exchanges)
    found: list[LoadRequest] = []
    for prompt, ids, output_len in find_fitting(
        exchanges, tokenizer.encode, output_len=dataset.answer_len, max_tokens=MAX_TOKENS
    ):
        found.append(LoadRequest(prompt, output_len, len(ids)))
        if len(found) == count:
            break
    if not found:
        raise ConfigError(f"{path}: no conversation of fitting length; give another file")
    return found


def _read_custom(dataset: Dataset, path: Path, tokenizer: Tokenizer | None, count: int) -> list[LoadRequest]:
    """Up to `count` prompts of JSON lines with a "prompt" and optional "output_tokens".

    Raises:
        ConfigError: a line has no prompt, or lacks the number of tokens that it must give.
    """
    found: list[tuple[str, int]] = []
    for where, record in _read_records(path):
        prompt, length = record.get("prompt"), dataset.answer_len
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f'{where}: no text under "prompt"; mend it')
        if length is None:
            length = record.get("output_tokens")
        if type(length) is not int or length < 1:
            raise ConfigError(f'{where}: no number above 0 under "output_tokens"; mend it or give custom_output_len')
        found.append((prompt, length))
    return _apply_chat_template(dataset, found, tokenizer, count)


def _read_spec_bench(dataset: Dataset, path: Path, tokenizer: Tokenizer | None, count: int) -> list[LoadRequest]:
    """The first turns of up to `count` Spec-Bench questions, of the dataset's category if it names one.

    Raises:
        ConfigError: a line has no turns, or no question is of that category.
    """
    prompts: list[str] = []
    categories: set[str] = set()
    for where, record in _read_records(path):
        turns, category = record.get("turns"), str(record.get("category"))
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise ConfigError(f'{where}: no list of texts under "turns"; mend it')
        categories.add(category)
        if dataset.spec_bench_category in (None, category):
            prompts.append(turns[0])
    if not prompts:
        known = ", ".join(sorted(categories))
        raise ConfigError(f"spec_bench_category: got {dataset.spec_bench_category!r}; {path} has {known}")
    with_lengths = [(prompt, dataset.answer_len or 1) for prompt in prompts]
    return _apply_chat_template(dataset, with_lengths, tokenizer, count)


def _apply_chat_template(
    dataset: Dataset, prompts: list[tuple[str, int]], tokenizer: Tokenizer | None, count: int
) -> list[LoadRequest]:
    """The first `count` shuffled prompts, as user messages in token ids if a tokenizer with a template is given.

    They are token ids because the template writes the begin-of-text token, which a server would add to a
    text once more.
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


def _read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """File and number of each non-empty line, for messages, and the JSON object on it.

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


class _RandomText:
    """Draws random tokens whose text encodes to the same number of tokens.

    Tokens are drawn from those that decode to whole characters, special tokens left out.
    """

    def __init__(self, tokenizer: Tokenizer, random: np.random.Generator) -> None:
        self.tokenizer = tokenizer
        self.random = random
        self.num_special = len(tokenizer.encode(""))  # special tokens that a server adds to a text
        plain = sorted(set(range(tokenizer.vocab_size)) - tokenizer.special_token_ids)
        self._ids = np.array([token_id for token_id in plain if REPLACEMENT not in tokenizer.token_text(token_id)])

    def draw(self, num_tokens: int, prefix: list[int] | None = None) -> list[int]:
        """`num_tokens` token ids, which begin with those of `prefix`.

        Random neighbours may merge when their text is encoded, so missing tokens are drawn again a few
        times; the result may still be some tokens longer or shorter.
        """
        ids = list(prefix or [])
        for _ in range(MAX_TRIES):
            ids += self.random.choice(self._ids, max(num_tokens - len(ids), 0)).tolist()
            ids = self.tokenizer.encode(self._text(ids[:num_tokens]), add_special_tokens=False)
            if len(ids) == num_tokens:
                break
        return ids

    def request(self, ids: list[int], output_len: int) -> LoadRequest:
        """A request for `output_len` tokens after the text of `ids`."""
        text = self._text(ids)
        return LoadRequest(text, output_len, len(self.tokenizer.encode(text)))

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def _draw_random(dataset: Dataset, tokenizer: Tokenizer, count: int) -> list[LoadRequest]:
    """Random prompts of uniformly drawn lengths, which include the special tokens that a server adds.

    Raises:
        ConfigError: a prompt could be empty.
    """
    texts = _RandomText(tokenizer, np.random.default_rng(dataset.seed))
    input_ratio, output_ratio = dataset.range_ratios
    inputs = _length_range(max(dataset.prompt_len - texts.num_special, 0), input_ratio, least=0)
    outputs = _length_range(dataset.answer_len or 1, output_ratio, least=1)
    if dataset.random_prefix_len + inputs[0] < 1:
        raise ConfigError(
            f"random_input_len: got {dataset.prompt_len}, of which the tokenizer takes {texts.num_special} for special "
            "tokens; must leave 1 or more, the smallest of the range included"
        )
    prefix = texts.draw(dataset.random_prefix_len)
    requests, num_inexact = [], 0
    for _ in range(count):
        num_tokens = len(prefix) + int(texts.random.integers(inputs[0], inputs[1] + 1))
        output_len = int(texts.random.integers(outputs[0], outputs[1] + 1))
        ids = texts.draw(num_tokens, prefix)
        num_inexact += len(ids) != num_tokens
        requests.append(texts.request(ids, output_len))
    _warn_of_inexact(num_inexact)
    return requests


def _draw_prefix_repetition(dataset: Dataset, tokenizer: Tokenizer, count: int) -> list[LoadRequest]:
    """Random prompts that share a few prefixes, those of the benchmark in random order; warm-ups come after them."""
    texts = _RandomText(tokenizer, np.random.default_rng(dataset.seed))
    prefixes = [texts.draw(dataset.prefix_repetition_prefix_len) for _ in range(dataset.prefix_repetition_num_prefixes)]
    num_tokens = dataset.prefix_repetition_prefix_len + dataset.prefix_repetition_suffix_len
    requests, num_inexact = [], 0
    for number in range(count):
        ids = prefixes[number % len(prefixes)] + texts.draw(dataset.prefix_repetition_suffix_len)
        request = texts.request(ids, dataset.answer_len or 1)
        num_inexact += request.num_prompt_tokens != num_tokens + texts.num_special
        requests.append(request)
    _warn_of_inexact(num_inexact)
    if not dataset.disable_shuffle:
        measured = requests[: dataset.num_prompts]
        random.Random(dataset.seed).shuffle(measured)
        requests[: dataset.num_prompts] = measured
    return requests


def _length_range(length: int, ratio: float, *, least: int) -> tuple[int, int]:
    """The smallest and the largest length to draw, both inclusive."""
    return max(math.floor(length * (1 - ratio)), least), max(math.ceil(length * (1 + ratio)), least)


def _warn_of_inexact(num_prompts: int) -> None:
    if num_prompts:
        logger.warning(
            "%d random prompts are some tokens longer or shorter than asked for, as their text is", num_prompts
        )
