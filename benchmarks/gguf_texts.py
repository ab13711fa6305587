"""Explains where greedy texts of forerun and of llama.cpp part on the same GGUF file.

    python -m benchmarks.gguf_texts --files model-Q8_0.gguf model-Q4_K_M.gguf --prompts FILE --json FILE

Both compute with the weights that the file defines. llama.cpp rounds the inputs of each product to 8 bits, forerun to bf16 or
int16, so that logits differ a little, and texts part where the two best tokens are close. For each prompt this finds the first token that
llama.cpp would have written otherwise, and asks whether rounding to 8 bits explains it: the model is computed in fp32 with the
same weights, once as it is and once with inputs rounded as llama.cpp's Q8_0 does, in blocks of 32. The difference of the two
tells how much logits move (their standard deviation among the likeliest tokens of that place). A place is explained if the two
tokens are at most four standard deviations of a difference of two logits apart in fp32.

Prompts are the first "turns" of a file of JSON lines, as MT-Bench and Spec-Bench have them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.peers.engines import BOUND
from benchmarks.peers.install import DEFAULT_FOLDER, python_in
from benchmarks.peers.worker_process import WorkerProcess
from benchmarks.prompt_files import first_turns
from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_machine
from forerun.models.base import LoadedTarget
from forerun.train.target import load_for_training, observe

BLOCK = 32
NUM_LIKELY = 64
MOST_DEVIATIONS = 4.0

Logits = npt.NDArray[np.float32]


class RoundedInputs(TorchFunctionMode):
    """While it is entered, products of matrices round their inputs to 8 bits, with a scale for each block of 32."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is F.linear:
            args = (round_to_8_bits(args[0]), *args[1:])
        return function(*args, **(kwargs or {}))


def round_to_8_bits(rows: Tensor) -> Tensor:
    """Round [..., inputs] as Q8_0 does: 127 steps of a block's largest value, with the scale in fp16."""
    blocks = rows.reshape(-1, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(largest > 0, blocks / largest, 0).round()
    return (codes * largest.half().float()).reshape(rows.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Where llama.cpp would first have written another token; logits are those of the fp32 model.

    Attributes:
        prompt: its number.
        place: in the answer, from 0.
        ours, theirs: token ids.
        gap: logit of ours less that of theirs.
        their_gap: the same in llama.cpp's logits.
        deviation: of a difference of two logits when inputs are rounded to 8 bits, at this place.
        is_explained: whether the gap is at most four deviations.
    """

    prompt: int
    place: int
    ours: int
    theirs: int
    gap: float
    their_gap: float
    deviation: float
    is_explained: bool


def exact_logits(target: LoadedTarget, prompt: Sequence[int], answer: Sequence[int]) -> Logits:
    """The fp32 model's logits by which each token of an answer is chosen: [answer, vocabulary]."""
    logits = observe(target, [[*prompt, *answer[:-1]]], frozenset()).logits[0, len(prompt) - 1 :]
    return np.asarray(logits.numpy())


def deviation_of_differences(exact: Logits, rounded: Logits) -> float:
    """The standard deviation of what rounding adds to the difference of two logits, over a place's likeliest tokens."""
    likely = np.argsort(exact)[-NUM_LIKELY:]
    return float(np.sqrt(2) * np.std((rounded - exact)[likely]))


def find_parting(prompt: int, answer: Sequence[int], theirs: Logits, exact: Logits, rounded: Logits) -> Parting | None:
    """The first place of an answer where llama.cpp's logits prefer another token, or None."""
    best = theirs.argmax(-1)
    places = np.flatnonzero(best != np.asarray(answer))
    if not places.size:
        return None
    place = int(places[0])
    ours, other = answer[place], int(best[place])
    gap = float(exact[place, ours] - exact[place, other])
    deviation = deviation_of_differences(exact[place], rounded[place])
    return Parting(
        prompt=prompt,
        place=place,
        ours=ours,
        theirs=other,
        gap=gap,
        their_gap=float(theirs[place, ours] - theirs[place, other]),
        deviation=deviation,
        is_explained=abs(gap) <= MOST_DEVIATIONS * deviation,
    )


def compare(
    file: Path, messages: Sequence[str], *, tokenizer: str | None, max_tokens: int, threads: int
) -> list[Parting]:
    """Where llama.cpp's greedy answers part from forerun's."""
    python = python_in("llama_cpp", DEFAULT_FOLDER)  # before anything is computed
    llm = LLM(str(file), tokenizer=tokenizer, max_model_len=2048, speculative_config=None)
    conversations = [[{"role": "user", "content": message}] for message in messages]
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    outputs = llm.chat(conversations, greedy, use_tqdm=False)
    texts = [(list(output.prompt_token_ids), list(output.outputs[0].token_ids)) for output in outputs]
    del llm  # before the fp32 model is loaded
    target = load_for_training(str(file), dtype=torch.float32)
    bound = {name: value.format(threads=threads) for name, value in BOUND.items()}
    partings = []
    with tempfile.TemporaryDirectory() as folder:
        process = WorkerProcess(
            [str(python), "-m", "benchmarks.peers.workers.llama_cpp_logits"],
            environment=bound,
            log=Path(folder) / "llama_cpp.log",
        )
        with closing(process) as worker:
            worker.ask("load", model=str(file), max_model_len=2048, num_threads=threads)
            for number, (prompt, answer) in enumerate(texts):
                logits = str(Path(folder) / "logits.npy")
                worker.ask("logits", prompt=prompt, answer=answer, file=logits)
                exact = exact_logits(target, prompt, answer)
                with RoundedInputs():
                    rounded = exact_logits(target, prompt, answer)
                found = find_parting(number, answer, np.load(logits), exact, rounded)
                if found is not None:
                    partings.append(found)
    return partings


def main() -> None:
    """Compare each file's texts, print a line for each, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tokenizer", help="a model whose chat template lays out prompts, if a file has none")
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    messages = first_turns(arguments.prompts)[: arguments.num_prompts]
    results = {}
    for file in map(Path, arguments.files):
        partings = compare(
            file,
            messages,
            tokenizer=arguments.tokenizer,
            max_tokens=arguments.max_tokens,
            threads=arguments.threads,
        )
        results[file.name] = [asdict(parting) for parting in partings]
        explained = sum(parting.is_explained for parting in partings)
        ratios = [abs(parting.gap) / parting.deviation for parting in partings]
        print(
            f"{file.name}: {len(messages)} prompts, {len(partings)} texts part, {explained} explained; gap in deviations: "
            f"median {statistics.median(ratios or [0.0]):.2f}, largest {max(ratios, default=0.0):.2f}",
            flush=True,
        )
        if arguments.json:
            report = {
                "machine": describe_machine(torch.device("cpu")),
                "num_prompts": len(messages),
                "max_tokens": arguments.max_tokens,
                "partings": results,
            }
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
