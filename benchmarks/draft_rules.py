"""Measures rules of draft length by replaying drafters over texts that the target generated.

Run: python -m benchmarks.draft_rules DATA [--model smollm2-135m] [--texts FILE] [--json FILE]
DATA holds the_algorithms/python_files.jsonl.gz and mt_bench/question.jsonl. The accepted part of a draft
depends on the text alone, so the target generates each text once (into --texts, which later runs read)
and the rest is arithmetic: a replayed step costs what `COSTS` gives for its rows. Prefill is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.prompt_files import FUNCTION, first_turns, source_files
from forerun import LLM, SamplingParams
from forerun.config.speculative_config import resolve_speculative
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, DraftRequest, TargetInfo

NUM_FILES = 64
NUM_TOKENS = 192
DRAFTING = 0.005  # cost of a call of the drafter, in passes

FLAT = (1.0, 1.03, 1.08, 1.13, 1.2, 1.25, 1.3, 1.35, 1.44, 1.54, 1.63, 1.73, 1.82, 1.91, 2.01, 2.1)
COSTS: dict[str, Callable[[int], float]] = {
    "flat": lambda rows: FLAT[rows - 1] if rows <= len(FLAT) else FLAT[-1] + 0.1 * (rows - len(FLAT)),
    "steep": lambda rows: 1 + 0.25 * (rows - 1),
}
"""Cost of a pass over n rows, in passes over one row: "flat" is the CPU kernels' aim, "steep" is torch on a CPU."""


def ngram(shortest: int, num_tokens: int, threshold: float) -> dict[str, Any]:
    """The n-gram drafter with matches of up to 5 tokens."""
    return {
        "method": "ngram",
        "num_speculative_tokens": num_tokens,
        "prompt_lookup_min": shortest,
        "prompt_lookup_max": 5,
        "draft_confidence_threshold": threshold,
    }


def suffix(threshold: float, factor: float = 1.0) -> dict[str, Any]:
    """The suffix drafter without past responses."""
    return {
        "method": "suffix",
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": factor,
        "draft_confidence_threshold": threshold,
    }


RULES: dict[str, dict[str, Any]] = {
    f"ngram {shortest}-5, K={num_tokens}, {threshold:g}": ngram(shortest, num_tokens, threshold)
    for shortest in (1, 2)
    for num_tokens in (5, 8, 16)
    for threshold in (0.0, 0.25, 0.4)
} | {
    f"suffix, factor {factor:g}, {threshold:g}": suffix(threshold, factor)
    for factor in (1.0, 2.0)
    for threshold in (0.0, 0.25, 0.4)
}


def messages(data: Path) -> Iterator[tuple[str, float, str]]:
    """Kind of text, temperature and user message of each prompt."""
    questions = first_turns(data / "mt_bench" / "question.jsonl")
    yield from (("chat", 0.0, question) for question in questions)
    yield from (("chat, temperature 1", 1.0, question) for question in questions[::2])
    files = list(source_files(data / "the_algorithms"))
    random.Random(0).shuffle(files)
    defined = ((code, FUNCTION.search(code)) for code in files if 400 < len(code) < 1500)
    named = [(code, found.group(1)) for code, found in defined if found]
    for code, name in named[:NUM_FILES]:
        wish = f"Rename the function {name} to new_{name} in this file. Answer with the whole file and nothing else."
        yield "code edit", 0.0, f"{wish}\n\n```python\n{code}```"


def write_texts(model: str, data: Path, path: Path) -> None:
    """Let the target answer every prompt."""
    llm = LLM(model, dtype="float32", max_model_len=2048)
    kinds, temperatures, prompts = zip(*messages(data), strict=True)
    sampling = [SamplingParams(temperature=t, max_tokens=NUM_TOKENS, seed=7) for t in temperatures]
    outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], sampling)
    with path.open("w") as file:
        for kind, output in zip(kinds, outputs, strict=True):
            text = {"kind": kind, "prompt": output.prompt_token_ids, "answer": output.outputs[0].token_ids}
            file.write(json.dumps(text) + "\n")


def replay(text: dict[str, Any], drafter: Drafter, num_tokens: int) -> list[int]:
    """Rows of each step that generates the answer after its first token, with the drafts of `drafter`."""
    answer: list[int] = text["answer"]
    sequence = Sequence(seq_id=0, prompt_ids=text["prompt"], output_ids=answer[:1], sampling=SamplingParams(), seed=0)
    drafter.start(sequence)
    steps = []
    while (done := len(sequence.output_ids)) < len(answer):
        room = min(num_tokens, len(answer) - done - 1)
        (draft,) = drafter.propose(DraftContext(requests=[DraftRequest(sequence, room, room)]))
        drafted = draft.token_ids if room else ()
        num_accepted = 0
        while num_accepted < len(drafted) and drafted[num_accepted] == answer[done + num_accepted]:
            num_accepted += 1
        sequence.output_ids += answer[done : done + num_accepted + 1]
        steps.append(1 + len(drafted))
    drafter.stop(sequence)
    return steps


def measure(texts: list[dict[str, Any]], config: dict[str, Any], cost: Callable[[int], float]) -> dict[str, Any]:
    """Speed-up over plain decoding: of all texts together, of the median text and of the worst text."""
    resolved = resolve_speculative(config)
    num_tokens = resolved.num_speculative_tokens
    target = TargetInfo(vocab_size=1 << 20, max_model_len=1 << 20, num_speculative_tokens=num_tokens)
    plain, drafted = [], []
    for text in texts:
        steps = replay(text, resolved.drafter.build(target), num_tokens)
        plain.append(len(text["answer"]) - 1)
        drafted.append(sum(cost(rows) + DRAFTING for rows in steps))
    speedups = [p / d for p, d in zip(plain, drafted, strict=True)]
    return {"all": sum(plain) / sum(drafted), "median": statistics.median(speedups), "worst": min(speedups)}


def main() -> None:
    """Write the texts unless they are there, replay every rule, print one table per cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", type=Path, default=Path("draft_rules_texts.jsonl"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.texts.exists():
        write_texts(arguments.model, arguments.data, arguments.texts)
    texts = [json.loads(line) for line in arguments.texts.read_text().splitlines()]
    texts = [text for text in texts if len(text["answer"]) >= 8]
    kinds = sorted({text["kind"] for text in texts})
    print(f"{len(texts)} texts of {arguments.model}; speed-up of all / of the worst")
    results = []
    for costs, cost in COSTS.items():
        print(f"\n{costs + ' cost':28}" + "".join(f"{kind:>22}" for kind in kinds))
        for name, config in RULES.items():
            found = {kind: measure([t for t in texts if t["kind"] == kind], config, cost) for kind in kinds}
            results += [{"costs": costs, "rule": name, "kind": kind, **one} for kind, one in found.items()]
            print(f"{name:28}" + "".join(f"{one['all']:14.2f} / {one['worst']:5.2f}" for one in found.values()))
    if arguments.json:
        arguments.json.write_text(json.dumps({"model": arguments.model, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
