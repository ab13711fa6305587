"""Tensor parallel against threads: the same model in one process with all threads, and in N processes that share them.

Run: python -m benchmarks.tensor_parallel [--model smollm2-135m] [--sizes 1 2] [--device cuda] [--json FILE]
Each turn starts every configuration afresh, one after the other, so that each has the cores to itself; the order changes from
turn to turn. Prints the median milliseconds of a step of plain decoding at each batch size, and of a prompt, and the share of
one process's speed that is left. The texts of all configurations are compared as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_machine

BATCHES = (1, 4, 16)
PROMPT_TOKENS = 512
WARM_STEPS = 5


def measure_here(model: str, size: int, *, device: str, num_steps: int) -> dict[str, Any]:
    """Milliseconds by measure, and the tokens written, of one configuration in this process."""
    llm = LLM(
        model,
        device=device,
        tensor_parallel_size=size,
        max_model_len=1024,
        speculative_config=None,
        enable_prefix_caching=False,
    )
    engine = llm.engine
    times: dict[str, float] = {}
    written: list[list[int]] = []
    sampling = SamplingParams(temperature=0.0, max_tokens=num_steps + WARM_STEPS, ignore_eos=True)
    for batch in BATCHES:
        prompts = [[(7 * i + 13 * place) % 997 + 5 for place in range(16)] for i in range(batch)]
        for i, prompt in enumerate(prompts):
            engine.add_request(f"{batch}.{i}", prompt, sampling)
        taken = []
        while engine.has_work:
            started = time.perf_counter()
            output = engine.step()
            taken.append(1e3 * (time.perf_counter() - started))
            written += [one.outputs[0].token_ids for one in output.finished]
        times[f"decode {batch}"] = statistics.median(taken[WARM_STEPS:])
    prompt = [(11 * place) % 997 + 5 for place in range(PROMPT_TOKENS)]
    once = SamplingParams(temperature=0.0, max_tokens=1)
    taken = []
    for _ in range(4):
        started = time.perf_counter()
        llm.generate([prompt], once, use_tqdm=False)
        taken.append(1e3 * (time.perf_counter() - started))
    times[f"prompt of {PROMPT_TOKENS}"] = statistics.median(taken[1:])
    return {"times": times, "written": written}


def measure(arguments: argparse.Namespace, size: int) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--model", arguments.model]
    command += ["--device", arguments.device, "--steps", str(arguments.steps), "--here", str(size)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure every configuration in turns and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[1, 2], help="the first is what the others are held against"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here is not None:
        print(
            json.dumps(
                measure_here(arguments.model, arguments.here, device=arguments.device, num_steps=arguments.steps)
            )
        )
        return
    found: dict[int, list[dict[str, Any]]] = {size: [] for size in arguments.sizes}
    for turn in range(arguments.rounds):
        order = arguments.sizes if turn % 2 == 0 else arguments.sizes[::-1]
        for size in order:
            found[size].append(measure(arguments, size))
    machine = describe_machine(torch.device(arguments.device))
    texts = {json.dumps(one["written"]) for runs in found.values() for one in runs}
    print(f"{machine}; texts {'are equal' if len(texts) == 1 else 'DIFFER'}")
    first = arguments.sizes[0]
    medians = {
        size: {name: statistics.median(one["times"][name] for one in runs) for name in runs[0]["times"]}
        for size, runs in found.items()
    }
    for name, base in medians[first].items():
        cells = [f"{size}: {times[name]:8.2f} ms ({base / times[name]:.2f})" for size, times in medians.items()]
        print(f"{name:16}", *cells, sep="  ")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "runs": found, "medians": medians}, indent=1))


if __name__ == "__main__":
    main()
