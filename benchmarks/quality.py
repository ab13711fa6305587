"""Measures the quality of number formats: perplexity of a text, right answers to questions, and agreement with bf16.

Run: python -m benchmarks.quality --text FILE [--prompts FILE] [--formats int8 int4] [--group-sizes 128,64]
         [--files FILE,FILE] [--output-json FILE]
     python -m benchmarks.quality --text FILE --num-tokens 1024 --num-prompts 2 --max-tokens 8 --every-question 50    # does it run?

The text's first tokens are cut into windows, each scored alone. Questions have four answers, as MMLU's have, of which the model
takes the likeliest (see `benchmarks.facts`). Prompts are answered greedily: the first "turns" of a file of JSON lines as MT-Bench
and Spec-Bench have them, or else forerun's built-in ones. `--group-sizes` adds int8 weights with a scale per that number of inputs,
which the kernels do not support: such weights are rounded at load and computed in fp32. `--files` adds the same model in other
files, such as those that `benchmarks.quantized_files` has llama.cpp write; they are computed as any user's file is.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.command_line import without_folder
from benchmarks.facts import Question, read_questions
from benchmarks.prompt_files import first_turns
from benchmarks.rounding import load_rounded
from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_kernels, describe_machine
from forerun.bench.prompts import WORKLOADS
from forerun.models.store import resolve_model
from forerun.models.tokenizer import Tokenizer, load_tokenizer

REFERENCE = "bf16"
FORMATS: dict[str, dict[str, Any]] = {
    REFERENCE: {"dtype": "bfloat16"},
    "fp32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int4-symmetric": {"quantization": "int4-symmetric"},
    **{
        f"int4, activations {name}": {"quantization": "int4", "activation_dtype": name}
        for name in ("bfloat16", "int16", "int8")
    },
}
SETTINGS = {"max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 16, "enable_prefix_caching": False}
WINDOW = 512


@dataclass(frozen=True, slots=True)
class Choice:
    """A question in tokens: `answers[i]` are those of answer i, the right one first, and `num_bytes[i]` its length as a text."""

    kind: str
    question: list[int]
    answers: list[list[int]]
    num_bytes: list[int]


@dataclass(frozen=True, slots=True)
class Samples:
    """The token ids that a format is measured on."""

    windows: list[list[int]]
    prompts: list[list[int]]
    choices: list[Choice]


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one format.

    `losses[i]` is the mean negative log-likelihood (nats) of window i, and `texts[i]` the greedy answer to
    prompt i. `num_judged` counts the tokens of the reference's answers, `agreed` those of them that are the
    most likely in this format too, given the reference's text before them. `right` says of each question whether the
    likeliest answer is the right one.
    """

    losses: list[float]
    right: list[bool]
    texts: list[list[int]]
    agreed: int
    num_judged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One row of the table."""

    name: str
    kernels: str
    perplexity: float
    perplexity_ratio: float  # to the reference's
    perplexity_ratio_error: float  # one standard error, over windows
    accuracy: float  # share of the questions answered right
    accuracy_by_kind: dict[str, float]
    num_changed: int  # questions that one of the two answers right, and the other does not
    agreement: float  # share of the reference's tokens that are the most likely here
    median_common_prefix: float  # tokens
    num_identical: int  # answers equal from start to end


def measure(llm: LLM, samples: Samples, *, reference: Sequence[Sequence[int]] | None, max_tokens: int) -> Measured:
    """Score the windows, answer the prompts, and judge the reference's answers, or the own ones if that is None."""
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    answers = [output.outputs[0].token_ids for output in llm.generate(samples.prompts, greedy, use_tqdm=False)]
    judged = answers if reference is None else reference
    texts = [[*prompt, *answer] for prompt, answer in zip(samples.prompts, judged, strict=True)]
    ranks = [
        rank
        for scored, answer in zip(score(llm, texts), judged, strict=True)
        for _, rank in scored[len(scored) - len(answer) :]
    ]
    return Measured(
        losses=[-statistics.fmean(logprob for logprob, _ in scored) for scored in score(llm, samples.windows)],
        right=answer(llm, samples.choices),
        texts=answers,
        agreed=ranks.count(1),
        num_judged=len(ranks),
    )


def answer(llm: LLM, choices: Sequence[Choice]) -> list[bool]:
    """Whether the right answer to each question is the likeliest, per byte of it: else long ones would never be.

    That is what lm-evaluation-harness calls the normalised accuracy.
    """
    texts = [choice.question + answer for choice in choices for answer in choice.answers]
    scored = score(llm, texts)
    right = []
    for choice in choices:
        chances = [
            math.fsum(logprob for logprob, _ in next(scored)[-len(answer) :]) / num_bytes
            for answer, num_bytes in zip(choice.answers, choice.num_bytes, strict=True)
        ]
        right.append(chances[0] > max(chances[1:]))
    return right


def score(llm: LLM, texts: list[list[int]]) -> Iterator[list[tuple[float, int | None]]]:
    """Log-probability and rank of every token but the first, for each text."""
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for text, output in zip(texts, llm.generate(texts, sampling, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None, "they were asked for"
        entries = [entry[token] for entry, token in zip(output.prompt_logprobs, text, strict=True) if entry is not None]
        yield [(entry.logprob, entry.rank) for entry in entries]


def compare(name: str, kernels: str, found: Measured, reference: Measured, kinds: Sequence[str]) -> Quality:
    """Compare a format with the reference; `kinds[i]` is the kind of question i."""
    differences = [loss - other for loss, other in zip(found.losses, reference.losses, strict=True)]
    ratio = math.exp(statistics.fmean(differences))
    prefixes = [common_prefix(*texts) for texts in zip(found.texts, reference.texts, strict=True)]
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for kind, is_right in zip(kinds, found.right, strict=True):
        by_kind[kind].append(is_right)
    return Quality(
        name=name,
        kernels=kernels,
        perplexity=math.exp(statistics.fmean(found.losses)),
        perplexity_ratio=ratio,
        perplexity_ratio_error=ratio * statistics.stdev(differences) / math.sqrt(len(differences)),
        accuracy=statistics.fmean(found.right),
        accuracy_by_kind={kind: statistics.fmean(right) for kind, right in by_kind.items()},
        num_changed=sum(one != other for one, other in zip(found.right, reference.right, strict=True)),
        agreement=found.agreed / found.num_judged,
        median_common_prefix=statistics.median(prefixes),
        num_identical=sum(text == other for text, other in zip(found.texts, reference.texts, strict=True)),
    )


def common_prefix(text: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens that two texts share at the start."""
    pairs = zip(text, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(other)))


def read_samples(arguments: argparse.Namespace) -> Samples:
    """Windows of the text and prompts as conversations, in the model's tokens."""
    tokenizer = load_tokenizer(resolve_model(arguments.model))
    ids = tokenizer.encode(arguments.text.read_text(encoding="utf-8"))[: arguments.num_tokens]
    if arguments.prompts is None:
        messages = [message for workload in WORKLOADS.values() for message in workload]
    else:
        messages = first_turns(arguments.prompts)
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids) - WINDOW + 1, WINDOW)]
    if len(windows) < 2:
        raise SystemExit(f"--text: got {len(ids)} tokens; must be {2 * WINDOW} or more; give a longer text")
    prompts = [[{"role": "user", "content": message}] for message in messages[: arguments.num_prompts]]
    return Samples(
        windows=windows,
        prompts=[tokenizer.apply_chat_template(prompt) for prompt in prompts],
        choices=[to_tokens(tokenizer, question) for question in read_questions()[:: arguments.every_question]],
    )


def to_tokens(tokenizer: Tokenizer, question: Question) -> Choice:
    """A question in a model's tokens; an answer's own begin with its space."""
    return Choice(
        kind=question.kind,
        question=tokenizer.encode(question.text),
        answers=[tokenizer.encode(answer, add_special_tokens=False) for answer in question.answers],
        num_bytes=[len(answer.encode()) for answer in question.answers],
    )


def load(model: str, name: str) -> LLM:
    """Load the model in a format of `FORMATS`, or "group N", or from the file `name`."""
    if name in FORMATS:
        return LLM(model, **FORMATS[name], **SETTINGS, speculative_config=None)
    if not name.startswith("group "):
        return LLM(name, tokenizer=model, **SETTINGS, speculative_config=None)
    return load_rounded(model, group_size=int(name.removeprefix("group ")), settings=SETTINGS)


def show(qualities: Sequence[Quality], samples: Samples, console: Console) -> None:
    """Print a table."""
    table = Table(
        *("format", "perplexity", f"to {REFERENCE}", "right answers", f"not as {REFERENCE}"),
        *("agreement", "common prefix, median", "answers identical"),
    )
    for row in qualities:
        table.add_row(
            row.name,
            f"{row.perplexity:.4f}",
            f"{row.perplexity_ratio - 1:+.3%} ± {row.perplexity_ratio_error:.3%}",
            f"{row.accuracy:.1%}",
            f"{row.num_changed}/{len(samples.choices)}",
            f"{row.agreement:.2%}",
            f"{row.median_common_prefix:g}",
            f"{row.num_identical}/{len(samples.prompts)}",
        )
    console.print(table)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--num-tokens", type=int, default=8192)
    parser.add_argument("--every-question", type=int, default=1, metavar="N", help="ask every N-th question alone")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--num-prompts", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--formats", nargs="*", default=[*FORMATS], choices=[*FORMATS], help=f"{REFERENCE} is always one"
    )
    parser.add_argument("--group-sizes", default="")
    parser.add_argument("--files", default="")
    parser.add_argument("--output-json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure all formats, print a table, and write JSON."""
    arguments = parse()
    samples = read_samples(arguments)
    names = [
        *dict.fromkeys((REFERENCE, *arguments.formats)),
        *(f"group {size}" for size in arguments.group_sizes.split(",") if size),
    ]
    names += [file for file in arguments.files.split(",") if file]
    kinds = [choice.kind for choice in samples.choices]
    found: dict[str, Measured] = {}
    qualities: list[Quality] = []
    machine = describe_machine(torch.device("cpu"))
    for name in track(names, description="formats"):
        llm = load(arguments.model, name)
        reference = found.get(REFERENCE)
        found[name] = measure(
            llm, samples, reference=None if reference is None else reference.texts, max_tokens=arguments.max_tokens
        )
        qualities.append(compare(Path(name).name, describe_kernels(llm), found[name], found[REFERENCE], kinds))
        del llm  # before the next is loaded
        if arguments.output_json:  # after each format, as all of them take hours
            report = {
                "machine": machine,
                "model": without_folder(arguments.model),
                "text": arguments.text.name,
                "num_windows": len(samples.windows),
                "window": WINDOW,
                "num_questions": len(samples.choices),
                "num_prompts": len(samples.prompts),
                "num_judged": found[REFERENCE].num_judged,
                "results": [asdict(row) for row in qualities],
            }
            arguments.output_json.write_text(json.dumps(report, indent=1) + "\n")
    console = Console(width=120)
    num_scored = len(samples.windows) * (WINDOW - 1)
    console.print(
        machine, f"{arguments.model}; {num_scored} tokens scored, {found[REFERENCE].num_judged} judged", sep="\n"
    )
    show(qualities, samples, console)


if __name__ == "__main__":
    main()
