"""Counts the steps that predictions save, from none at all to the very answer.

Run: python -m benchmarks.predictions FOLDER [--model smollm2-135m]
FOLDER has .py files, or .jsonl.gz files with a "code" per line. The target renames functions in such files, and answers again
with each prediction, alone and before n-grams and suffixes. Nothing is timed: steps and rows depend on the texts alone.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.prompt_files import FUNCTION, source_files
from forerun import LLM, SamplingParams
from forerun.drafters.base import NoDrafter, TargetInfo

NUM_FILES = 10
NUM_TOKENS = 256


class Silent(NoDrafter):
    """A drafter that has nothing to add."""

    def __init__(self, target: TargetInfo) -> None:  # noqa: ARG002 - the signature is that of all drafters
        super().__init__()


DRAFTERS: dict[str, dict[str, Any]] = {
    "predictions alone": {"method": Silent},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
}


def edits(folder: Path) -> Iterator[tuple[str, str]]:
    """A user's message that asks for an edit, and the file that it is about."""
    files = sorted(source_files(folder))
    random.Random(0).shuffle(files)
    defined = ((code, FUNCTION.search(code)) for code in files if 400 < len(code) < 1400)
    named = [(code, found.group(1)) for code, found in defined if found]
    for code, name in named[:NUM_FILES]:
        file = f"```python\n{code}\n```"
        yield f"Rename the function {name} to new_{name} and answer with the whole file:\n\n{file}", file


def with_edited_lines(text: str, source: random.Random) -> str:
    """The text with a fifth of its lines left out, changed, or preceded by a line of their own."""
    lines = []
    for line in text.split("\n"):
        match source.randrange(15):
            case 0:
                continue
            case 1:
                lines += ["# a line that is not in the answer", line]
            case 2:
                lines.append(line.replace("n", "m"))
            case _:
                lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Print a table of drafters and predictions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    arguments = parser.parse_args()
    messages, files = zip(*edits(arguments.folder), strict=True)
    plain = LLM(arguments.model, max_model_len=2048, speculative_config=None)
    conversations = [[{"role": "user", "content": message}] for message in messages]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    answers = [output.outputs[0] for output in plain.chat(conversations, greedy)]
    source = random.Random(0)
    predictions: dict[str, list[str | None]] = {
        "none": [None] * len(answers),
        "the original file": list(files),
        "the answer, a fifth of its lines edited": [with_edited_lines(answer.text, source) for answer in answers],
        "the answer": [answer.text for answer in answers],
    }
    print(f"{arguments.model}, {len(answers)} edits, greedy, K = 16: tokens per step / draft tokens per step")
    print(f"{'prediction':42}" + "".join(f"{name:>20}" for name in DRAFTERS))
    for name, texts in predictions.items():
        sampling = [SamplingParams(temperature=0, max_tokens=NUM_TOKENS, prediction=text) for text in texts]
        cells = []
        for config in DRAFTERS.values():
            llm = plain.with_speculation(config | {"num_speculative_tokens": 16})
            outputs = llm.chat(conversations, sampling)
            assert [output.outputs[0].text for output in outputs] == [answer.text for answer in answers]
            counts = llm.stats.speculation
            cells.append(f"{counts.acceptance_length or 0:.2f} / {counts.num_draft_tokens / counts.num_steps:.2f}")
        print(f"{name:42}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
