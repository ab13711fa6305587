"""The prompts of an experiment: human turns of ShareGPT files, or forerun's built-in ones."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.experiment.settings import Settings
from forerun.bench.prompts import WORKLOADS
from forerun.errors import ConfigError

Warn = Callable[[str], None]


def read_texts(settings: Settings, warn: Warn) -> list[str]:
    """All prompts whose number of characters is within the settings' limits.

    Raises:
        ConfigError: there is no file, a file is not in the format, or no prompt is within the limits.
    """
    if settings.sharegpt_dir is None:
        texts = list(itertools.chain.from_iterable(WORKLOADS.values()))
        source = "the prompts that forerun ships"
    else:
        folder = Path(settings.sharegpt_dir).expanduser()
        texts = [text for file in _files(folder, settings, warn) for text in _turns(file, settings.max_load_lines)]
        source = str(folder)
    least, most = settings.prompt_min_length, settings.prompt_max_length
    fitting = [text for text in texts if least <= len(text) <= most]
    if not fitting:
        raise ConfigError(
            f"PROMPT_MIN_LENGTH, PROMPT_MAX_LENGTH: got {least} and {most}; none of the {len(texts)} prompts of {source} "
            "has so many characters; widen them"
        )
    return fitting


def _files(folder: Path, settings: Settings, warn: Warn) -> list[Path]:
    files = [folder / name for name in settings.sharegpt_files]
    found = [file for file in files if file.is_file()]
    if not found:
        raise ConfigError(
            f"SHAREGPT_DIR: got {str(folder)!r}; it has none of {', '.join(settings.sharegpt_files)}; "
            "set SHAREGPT_FILES to the names of your .jsonl files, or leave SHAREGPT_DIR out"
        )
    for file in files:
        if file not in found:
            warn(f"SHAREGPT_FILES: {file} is not there and left out")
    return found


def _turns(file: Path, most_lines: int) -> Iterator[str]:
    """The human turns in the first lines of a file, which hold a conversation each."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(itertools.islice(lines, most_lines), start=1):
            try:
                turns = json.loads(line)["conversations"]
                yield from (turn["value"].strip() for turn in turns if turn["from"] == "human" and turn["value"])
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(
                    f"{file}: line {number} is no conversation; must be an object with 'conversations', a list of "
                    "objects with 'from' and 'value'; mend it or lower MAX_LOAD_LINES"
                ) from None


def max_prompt_tokens(settings: Settings) -> int:
    """The tokens that a prompt may have at most."""
    room = min(settings.max_model_len, settings.vllm_max_model_len or settings.max_model_len)
    most = room - settings.generation_length
    return min(most, settings.max_batch_length) if settings.enable_batch else most


def draw_prompts(
    texts: Sequence[str], encode: Callable[[str], list[int]], *, max_tokens: int, seed: int
) -> Iterator[list[int]]:
    """Endless prompts as token ids, in an order that the seed determines; too long ones are left out.

    Raises:
        ConfigError: all prompts are too long.
    """
    order = list(texts)
    random.Random(seed).shuffle(order)
    while True:
        num_fitting = 0
        for text in order:
            token_ids = encode(text)
            if len(token_ids) <= max_tokens:
                num_fitting += 1
                yield token_ids
        if not num_fitting:
            raise ConfigError(
                f"MAX_BATCH_LENGTH, MAX_MODEL_LEN: every prompt has more than {max_tokens} tokens; "
                "raise them or lower PROMPT_MAX_LENGTH"
            )
