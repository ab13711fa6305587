"""What sampling costs: plain decoding with several sampling settings, against greedy, at 1, 8 and 32 sequences.

Run: python -m benchmarks.sampling_cost [--model smollm2-135m] [--json FILE]
All settings take turns, a few steps each, on the same engine and at the same length of text; each has greedy steps right before
or right after it, as the machine's drift within a minute is larger than what sampling costs. No sequences share KV: greedy
ones with the same prompt would, and would read less memory than sampled ones. Prints the median milliseconds
per step, and the share of greedy's speed that is left: the median over the rounds of greedy's time by the setting's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_kernels, describe_machine
from forerun.bench.prompts import WORKLOADS

GREEDY: dict[str, Any] = {"temperature": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "T=1 top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "T=1 top-p 0.95 top-k 50": {"temperature": 1.0, "top_p": 0.95, "top_k": 50},
    "T=1 top-p 0.95 penalties": {
        "temperature": 1.0,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
}
WARM_STEPS = 2


def measure(llm: LLM, num_seqs: int, *, num_rounds: int, num_steps: int) -> dict[str, list[tuple[float, float]]]:
    """For each setting and round, milliseconds of the median greedy step and of the median step with the setting."""
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    for turn in range(num_rounds):
        order = list(SETTINGS)
        shift = turn % len(order)
        for name in order[shift:] + order[:shift]:
            taken = {}
            for is_greedy in (True, False) if turn % 2 else (False, True):
                setting = GREEDY if is_greedy else SETTINGS[name]
                salt = f"{name}, turn {turn}, {setting}"
                steps = _measure_once(llm, num_seqs, setting, num_steps=num_steps, seed=turn, salt=salt)
                taken[is_greedy] = statistics.median(steps)
            pairs[name].append((taken[True], taken[False]))
    return pairs


def _measure_once(
    llm: LLM, num_seqs: int, setting: dict[str, Any], *, num_steps: int, seed: int, salt: str
) -> list[float]:
    engine, tokenizer = llm.engine, llm.get_tokenizer()
    messages = [text for texts in WORKLOADS.values() for text in texts]
    max_tokens = 2 * (num_steps + num_seqs + WARM_STEPS)
    for i, message in zip(range(num_seqs), itertools.cycle(messages), strict=False):
        sampling = SamplingParams(**setting, seed=seed * num_seqs + i, max_tokens=max_tokens, ignore_eos=True)
        prompt_ids = tokenizer.apply_chat_template([{"role": "user", "content": message}])
        engine.add_request(str(i), prompt_ids, sampling, cache_salt=f"{salt}, sequence {i}")
    while engine.state.num_waiting:
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    taken = []
    for _ in range(num_steps):
        started = time.perf_counter()
        engine.step()
        taken.append(1e3 * (time.perf_counter() - started))
    for i in range(num_seqs):
        engine.abort(str(i))
    return taken


def main() -> None:
    """Measure every setting at every batch size and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, max_model_len=1024, speculative_config=None)
    machine, kernels = describe_machine(llm.device), describe_kernels(llm)
    dtype = str(llm.dtype).removeprefix("torch.")
    print(f"{machine}\n\nmedian ms per step, {arguments.model}, {dtype}, kernels: {kernels}")
    print(f"{'setting':26} {'seqs':>4} {'ms':>8} {'of greedy':>10}")
    results = []
    for num_seqs in (1, 8, 32):
        pairs = measure(llm, num_seqs, num_rounds=arguments.rounds, num_steps=arguments.steps)
        greedy = statistics.median(plain for found in pairs.values() for plain, _ in found)
        medians = {"greedy": (greedy, 1.0)}
        for name, found in pairs.items():
            medians[name] = (
                statistics.median(sampled for _, sampled in found),
                statistics.median(plain / sampled for plain, sampled in found),
            )
        for name, (milliseconds, share) in medians.items():
            results.append({"setting": name, "num_seqs": num_seqs, "ms": milliseconds, "of_greedy": share})
            print(f"{name:26} {num_seqs:4} {milliseconds:8.3f} {share:10.3f}")
    if arguments.json:
        report: dict[str, Any] = {"machine": machine, "dtype": dtype, "kernels": kernels}
        report |= {"rounds": arguments.rounds, "steps": arguments.steps, "results": results}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
