"""What Python costs: the host's share of a step, at 1, 8 and 32 sequences.

Run: python -m benchmarks.host_overhead [--model smollm2-135m] [--json FILE]
Prints median milliseconds per decode step for each phase; "host" is all but forward and draft.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_kernels, describe_machine
from forerun.bench.prompts import WORKLOADS
from forerun.core.stats import PHASES

CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
}


def measure(llm: LLM, num_seqs: int, num_steps: int) -> dict[str, float]:
    """Median milliseconds per phase over decode steps with `num_seqs` sequences."""
    engine, tokenizer = llm.engine, llm.get_tokenizer()
    messages = [text for texts in WORKLOADS.values() for text in texts]
    sampling = SamplingParams(temperature=0, max_tokens=num_steps * 8, ignore_eos=True)
    for i in range(num_seqs):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": messages[i % len(messages)]}])
        engine.add_request(str(i), prompt, sampling)
    while engine.state.num_waiting:
        engine.step()
    engine.step()
    steps: list[dict[str, float]] = []
    for _ in range(num_steps):
        before = replace(engine.stats.times)
        engine.step()
        after = asdict(engine.stats.times)
        steps.append({phase: 1e3 * (after[phase] - getattr(before, phase)) for phase in PHASES})
    for i in range(num_seqs):
        engine.abort(str(i))
    medians = {phase: statistics.median(step[phase] for step in steps) for phase in PHASES}
    medians["host"] = statistics.median(
        sum(step[phase] for phase in PHASES if phase not in ("forward", "draft")) for step in steps
    )
    return medians


def main() -> None:
    """Measure every configuration and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    plain = LLM(arguments.model, max_model_len=2048, speculative_config=None)
    machine, kernels = describe_machine(plain.device), describe_kernels(plain)
    dtype = str(plain.dtype).removeprefix("torch.")
    print(f"{machine}\n\nmedian ms per step, {arguments.model}, {dtype}, kernels: {kernels}")
    print(f"{'config':8} {'seqs':>4} " + " ".join(f"{name:>9}" for name in (*PHASES, "host")))
    for name, config in CONFIGS.items():
        llm = plain.with_speculation(config)
        for num_seqs in (1, 8, 32):
            medians = measure(llm, num_seqs, arguments.steps)
            results.append({"config": name, "num_seqs": num_seqs, **medians})
            print(f"{name:8} {num_seqs:4} " + " ".join(f"{medians[phase]:9.3f}" for phase in (*PHASES, "host")))
    if arguments.json:
        report = {"machine": machine, "dtype": dtype, "kernels": kernels, "results": results}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
