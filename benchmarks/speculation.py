"""Speed-up of drafters against forerun's own plain decoding, interleaved in one run.

Run: python -m benchmarks.speculation [--model smollm2-135m] [--config NAME=JSON ...] [--json FILE]
Without --config the free drafters are measured; with it, the given speculative configurations.
Each prompt is decoded with every configuration in turn, `--repeats` times; medians are quoted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.prompts import WORKLOADS
from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_kernels, describe_machine

CONFIGS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 12},
}


@dataclass
class Runs:
    """What one configuration did on one workload, over all its prompts and repeats."""

    tokens_per_second: list[float] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)
    accepted: int = 0
    drafted: int = 0
    steps: int = 0
    num_prompts: int = 0
    num_identical: int = 0


def timed(llm: LLM, message: str, sampling: SamplingParams) -> tuple[float, Any]:
    """Tokens per second (prompt included) and the output."""
    start = time.perf_counter()
    output = llm.chat([{"role": "user", "content": message}], sampling, use_tqdm=False)[0]
    return len(output.outputs[0].token_ids) / (time.perf_counter() - start), output


def run_workload(llms: dict[str, LLM], messages: list[str], *, repeats: int, max_tokens: int) -> dict[str, Runs]:
    """Every configuration on every prompt, in turn, `repeats` times."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    found = {name: Runs() for name in llms}
    for message in messages:
        speeds: dict[str, list[float]] = {name: [] for name in llms}
        texts: dict[str, list[int]] = {}
        for _ in range(repeats):
            for name, llm in llms.items():
                speed, output = timed(llm, message, sampling)
                speeds[name].append(speed)
                texts[name] = output.outputs[0].token_ids
                found[name].accepted += output.speculation.num_accepted_tokens
                found[name].drafted += output.speculation.num_draft_tokens
                found[name].steps += output.speculation.num_steps
        for name, runs in found.items():
            runs.tokens_per_second.append(statistics.median(speeds[name]))
            pairs = zip(speeds[name], speeds["plain"], strict=True)
            runs.speedups.append(statistics.median(fast / slow for fast, slow in pairs))
            runs.num_prompts += 1
            runs.num_identical += texts[name] == texts["plain"]
    return found


def main() -> None:
    """Run all workloads, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--config", action="append", default=[], help='NAME={"method": ...}, as often as wanted')
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    # No prefix cache: each repeat computes its prompt again, and suffix keeps no past answers.
    plain = LLM(arguments.model, dtype=arguments.dtype, max_model_len=2048, enable_prefix_caching=False)
    given = {name: json.loads("{" + config) for name, config in (text.split("={", 1) for text in arguments.config)}
    configs = given or {
        name: {**c, "suffix_decoding_max_cached_requests": 0} if name == "suffix" else c for name, c in CONFIGS.items()
    }
    llms = {"plain": plain} | {name: plain.with_speculation(config) for name, config in configs.items()}
    run_workload(llms, WORKLOADS["chat"][:1], repeats=1, max_tokens=8)
    table = Table(
        "workload", "drafter", "tokens/s", "speed-up", "acceptance rate", "acceptance length", "texts identical"
    )
    rows: list[dict[str, Any]] = []
    for workload, messages in track(WORKLOADS.items(), description="workloads"):
        for name, runs in run_workload(
            llms, messages, repeats=arguments.repeats, max_tokens=arguments.max_tokens
        ).items():
            row = {
                "workload": workload,
                "drafter": name,
                "tokens_per_second": statistics.median(runs.tokens_per_second),
                "speedup": statistics.median(runs.speedups),
                "acceptance_rate": runs.accepted / runs.drafted if runs.drafted else None,
                "acceptance_length": 1 + runs.accepted / runs.steps,
                "identical": f"{runs.num_identical}/{runs.num_prompts}",
            }
            rows.append(row)
            rate = "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.2f}"
            table.add_row(
                workload,
                name,
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup']:.2f}",
                rate,
                f"{row['acceptance_length']:.2f}",
                str(row["identical"]),
            )
    dtype = str(plain.dtype).removeprefix("torch.")
    machine, kernels = describe_machine(plain.device), describe_kernels(plain)
    Console(width=120).print(machine, f"{arguments.model}, {dtype}, kernels: {kernels}", table, sep="\n")
    if arguments.json:
        report = {"machine": machine, "dtype": dtype, "kernels": kernels, "results": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
