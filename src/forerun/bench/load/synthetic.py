"""Prompts of random tokens, made so that their text has an exact number of them."""

from __future__ import annotations

import logging
import math

import numpy as np

from forerun.bench.load.answer import LoadRequest
from forerun.bench.load.dataset import Dataset
from forerun.errors import ConfigError
from forerun.models.tokenizer import REPLACEMENT, Tokenizer

logger = logging.getLogger(__name__)

MOST_TRIES = 10


class RandomText:
    """Draws texts of tokens that spell whole characters; special ones are left out."""

    def __init__(self, tokenizer: Tokenizer, random: np.random.Generator) -> None:
        """Draw from the vocabulary of `tokenizer`."""
        self.tokenizer = tokenizer
        self.random = random
        self.num_special = len(tokenizer.encode(""))  # that a server puts around a text
        plain = sorted(set(range(tokenizer.vocab_size)) - tokenizer.special_token_ids)
        self._ids = np.array([token_id for token_id in plain if REPLACEMENT not in tokenizer.token_text(token_id)])

    def draw(self, num_tokens: int, prefix: list[int] | None = None) -> list[int]:
        """Random token ids after those of a prefix, `num_tokens` in all.

        They are what their own text is encoded to, as far as a few tries allow: not all tokens side
        by side survive being written out.
        """
        ids = list(prefix or [])
        for _ in range(MOST_TRIES):
            ids += self.random.choice(self._ids, max(num_tokens - len(ids), 0)).tolist()
            ids = self.tokenizer.encode(self.text(ids[:num_tokens]), add_special_tokens=False)
            if len(ids) == num_tokens:
                break
        return ids

    def text(self, ids: list[int]) -> str:
        """What token ids spell."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def request(self, ids: list[int], output_len: int) -> LoadRequest:
        """A request for `output_len` tokens after the text of `ids`."""
        text = self.text(ids)
        return LoadRequest(text, output_len, len(self.tokenizer.encode(text)))


def draw_random(dataset: Dataset, tokenizer: Tokenizer, count: int) -> list[LoadRequest]:
    """Prompts of `random`: lengths uniform around the given ones, the tokens that a server adds included.

    Raises:
        ConfigError: prompts could be empty.
    """
    texts = RandomText(tokenizer, np.random.default_rng(dataset.seed))
    input_ratio, output_ratio = dataset.range_ratios
    inputs = _range(max(dataset.prompt_len - texts.num_special, 0), input_ratio, least=0)
    outputs = _range(dataset.answer_len or 1, output_ratio, least=1)
    if dataset.random_prefix_len + inputs[0] < 1:
        raise ConfigError(
            f"random_input_len: got {dataset.prompt_len}, of which the tokenizer takes {texts.num_special} for special "
            "tokens; must leave 1 or more, the smallest of the range included"
        )
    prefix = texts.draw(dataset.random_prefix_len)
    requests, num_missed = [], 0
    for _ in range(count):
        num_tokens = len(prefix) + int(texts.random.integers(inputs[0], inputs[1] + 1))
        output_len = int(texts.random.integers(outputs[0], outputs[1] + 1))
        ids = texts.draw(num_tokens, prefix)
        num_missed += len(ids) != num_tokens
        requests.append(texts.request(ids, output_len))
    _tell(num_missed)
    return requests


def draw_prefix_repetition(dataset: Dataset, tokenizer: Tokenizer, count: int) -> list[LoadRequest]:
    """Prompts that share few prefixes, in random order."""
    texts = RandomText(tokenizer, np.random.default_rng(dataset.seed))
    prefixes = [texts.draw(dataset.prefix_repetition_prefix_len) for _ in range(dataset.prefix_repetition_num_prefixes)]
    num_tokens = dataset.prefix_repetition_prefix_len + dataset.prefix_repetition_suffix_len
    requests, num_missed = [], 0
    for number in range(count):
        ids = prefixes[number % len(prefixes)] + texts.draw(dataset.prefix_repetition_suffix_len)
        request = texts.request(ids, dataset.answer_len or 1)
        num_missed += request.num_prompt_tokens != num_tokens + texts.num_special
        requests.append(request)
    _tell(num_missed)
    if not dataset.disable_shuffle:
        texts.random.shuffle(requests)
    return requests


def _range(length: int, ratio: float, *, least: int) -> tuple[int, int]:
    """The smallest and largest length, both drawn."""
    return max(math.floor(length * (1 - ratio)), least), max(math.ceil(length * (1 + ratio)), least)


def _tell(num_missed: int) -> None:
    if num_missed:
        logger.warning(
            "%d random prompts are some tokens longer or shorter than asked for, as their text is", num_missed
        )
