"""Reads conversations in ShareGPT's format: a JSON list of {"conversations": [{"value": ...}, ...]}."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from forerun.errors import ConfigError

# vLLM's limits of a prompt, its answer, and both together
MIN_TOKENS = 4
MAX_PROMPT_TOKENS = 1024
MAX_TOKENS = 2048


class Exchange(NamedTuple):
    """The first two turns of a conversation."""

    prompt: str
    answer: str


class SampledRequest(NamedTuple):
    """A prompt, and the number of tokens to generate for it."""

    prompt_token_ids: list[int]
    output_len: int


def read_conversations(path: Path) -> list[Exchange]:
    """The first exchange of each conversation; conversations of a single turn are left out.

    Raises:
        ConfigError: the file cannot be read or is not in the format.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"dataset_path: cannot read {path} ({error}); give a JSON file in ShareGPT's format"
        ) from error
    if not isinstance(content, list):
        raise ConfigError(f"{path}: got a {type(content).__name__}; must be a JSON list of conversations")
    turns = [_first_turns(path, index, entry) for index, entry in enumerate(content)]
    return [Exchange(*values) for values in turns if len(values) == len(Exchange._fields)]


def sample_requests(
    exchanges: Sequence[Exchange],
    encode: Callable[[str], list[int]],
    *,
    num_prompts: int,
    output_len: int | None,
    max_tokens: int,
    seed: int,
) -> list[SampledRequest]:
    """Draw requests of a length within vLLM's limits.

    Args:
        exchanges: what to draw from, without repetition.
        encode: returns a text's token ids.
        num_prompts: requests to draw.
        output_len: tokens to generate for each, or None for as many as the answer has.
        max_tokens: tokens of prompt and output together; vLLM's limit of 2048 holds too.
        seed: of the order.

    Raises:
        ConfigError: fewer than `num_prompts` conversations are of fitting length.
    """
    shuffled = random.Random(seed).sample(exchanges, len(exchanges))
    fitting = find_fitting(shuffled, encode, output_len=output_len, max_tokens=max_tokens)
    requests = [SampledRequest(ids, length) for _, ids, length in islice(fitting, num_prompts)]
    if len(requests) < num_prompts:
        raise ConfigError(
            f"num_prompts: got {num_prompts}; the file has {len(requests)} conversations of fitting length; "
            "ask for fewer prompts or raise max_model_len"
        )
    return requests


def find_fitting(
    exchanges: Iterable[Exchange], encode: Callable[[str], list[int]], *, output_len: int | None, max_tokens: int
) -> Iterator[tuple[str, list[int], int]]:
    """Text, token ids and tokens to generate of each prompt within vLLM's limits; see `sample_requests`."""
    for exchange in exchanges:
        prompt = encode(exchange.prompt)
        num_output = len(encode(exchange.answer)) if output_len is None else output_len
        fits = len(prompt) <= MAX_PROMPT_TOKENS and len(prompt) + num_output <= min(max_tokens, MAX_TOKENS)
        if fits and len(prompt) >= MIN_TOKENS and (output_len is not None or num_output >= MIN_TOKENS):
            yield exchange.prompt, prompt, num_output


def _first_turns(path: Path, index: int, entry: Any) -> list[str]:
    """The texts of a conversation's first two turns, or of its only one.

    Raises:
        ConfigError: the entry is not in the format.
    """
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise ConfigError(f"{path}: entry {index} has no list under 'conversations'; mend it")
    values: list[str] = []
    for place, turn in enumerate(turns[: len(Exchange._fields)]):
        value = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(value, str):
            raise ConfigError(f"{path}: entry {index}, turn {place} has no text under 'value'; mend it")
        values.append(value)
    return values
