"""The prompts of a run as token ids: code edits, questions, and prefixes of the code edits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.prompt_files import FUNCTION, first_turns, source_files
from forerun.errors import ForerunError
from forerun.models.tokenizer import Tokenizer

MIN_CODE_TOKENS, MAX_CODE_TOKENS = 300, 1000
PLAIN_TOKENS = 96
PREFILL_TOKENS = 512


class PromptError(ForerunError):
    """A prompt set has too few fitting prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSets:
    """Token ids of each prompt.

    `plain` has the first 96 tokens of each code prompt. `prefill` has 512 tokens each, of all code prompts
    concatenated, beginning with another one each time.
    """

    code: list[list[int]]
    chat: list[list[int]]
    plain: list[list[int]]
    prefill: list[list[int]]


def read_prompts(tokenizer: Tokenizer, *, code: Path, chat: Path, count: int) -> PromptSets:
    """`count` prompts of each kind.

    Args:
        tokenizer: with the model's chat template.
        code: a folder of .py files, or of .jsonl.gz files whose lines have a "code".
        chat: a .jsonl file whose lines have "turns" as in MT-Bench, of which the first is used.
        count: prompts of each kind.

    Raises:
        PromptError: there are too few fitting prompts.
    """
    edits = _take(code_prompts(tokenizer, code), count, source=code)
    questions = _take(chat_prompts(tokenizer, chat), count, source=chat)
    rows = [[token_id for prompt in edits[i:] + edits[:i] for token_id in prompt] for i in range(count)]
    return PromptSets(
        code=edits,
        chat=questions,
        plain=[prompt[:PLAIN_TOKENS] for prompt in edits],
        prefill=[(row * (1 + PREFILL_TOKENS // len(row)))[:PREFILL_TOKENS] for row in rows],
    )


def code_prompts(tokenizer: Tokenizer, folder: Path) -> Iterator[list[int]]:
    """Prompts to repeat a file with one function renamed, of fitting length, in random order."""
    files = sorted(source_files(folder))
    random.Random(0).shuffle(files)
    for code in files:
        found = FUNCTION.search(code)
        if found is None:
            continue
        prompt = _chat(
            tokenizer,
            f"```python\n{code}```\n\nRepeat the file above, with the function {found[1]} renamed to new_{found[1]}.",
        )
        if MIN_CODE_TOKENS <= len(prompt) <= MAX_CODE_TOKENS:
            yield prompt


def chat_prompts(tokenizer: Tokenizer, file: Path) -> Iterator[list[int]]:
    """First turns in random order, since the file is sorted by category."""
    questions = first_turns(file)
    random.Random(0).shuffle(questions)
    return (_chat(tokenizer, question) for question in questions)


def _chat(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": text}])


def _take(prompts: Iterator[list[int]], count: int, *, source: Path) -> list[list[int]]:
    taken = [prompt for prompt, _ in zip(prompts, range(count), strict=False)]
    if len(taken) < count:
        raise PromptError(f"{source}: got {len(taken)} fitting prompts; {count} are needed; ask for fewer or give more")
    return taken
