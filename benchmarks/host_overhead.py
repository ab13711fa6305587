"""What Python costs: the host's share of a step, at 1, 8 and 32 sequences, greedily and at temperature 1.

Run: python -m benchmarks.host_overhead [--model smollm2-135m] [--configs plain auto] [--json FILE]
Prints the milliseconds of each phase of a decode step that a fifth of the steps stay below, as other programs share the cores.
The kernels that compute the target, a head's chains and samples are taken out of each phase; "host" is all the rest of a step.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_kernels, describe_machine
from forerun.bench.prompts import WORKLOADS
from forerun.core.stats import PHASES
from forerun.ops.native.library import Kernels, best_kernels

CONFIGS: dict[str, dict[str, Any] | str | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "auto": "auto",
}

COMPUTING = {
    "decode": "forward",
    "linear": "forward",
    "read_outputs": "forward",
    "rms_norm": "forward",
    "decoder_layers": "forward",
    "sample": "verify",
    "draft_chains": "draft",
}
"""Functions of the kernels, and the phase that calls them."""

WARM_UP = 20  # steps
SHARE = 0.2


class KernelTime:
    """Seconds in the computing functions of the kernels, by phase."""

    def __init__(self, kernels: Kernels) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        for name, phase in COMPUTING.items():
            setattr(kernels, name, self._timed(getattr(kernels, name), phase))

    def _timed(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds[phase] += time.perf_counter() - start

        return timed


def measure(llm: LLM, kernels: KernelTime, num_seqs: int, num_steps: int, temperature: float) -> dict[str, float]:
    """Milliseconds per phase over decode steps with `num_seqs` sequences, the kernels' taken out; a fifth of the steps took less."""
    engine, tokenizer = llm.engine, llm.get_tokenizer()
    messages = [text for texts in WORKLOADS.values() for text in texts]
    steps: list[dict[str, float]] = []
    num_rounds = -(-len(messages) // num_seqs)
    with engine.stepping():
        for number in range(num_rounds):
            sampling = SamplingParams(temperature=temperature, max_tokens=1500, ignore_eos=True, seed=number)
            for i in range(num_seqs):
                message = messages[(number * num_seqs + i) % len(messages)]
                prompt = tokenizer.apply_chat_template([{"role": "user", "content": message}])
                engine.add_request(str(i), prompt, sampling)
            while engine.state.num_waiting:
                engine.step()
            for _ in range(WARM_UP):
                engine.step()
            steps += [timed_step(llm, kernels) for _ in range(-(-num_steps // num_rounds))]
            for i in range(num_seqs):
                engine.abort(str(i))
    names = steps[0].keys()
    return {name: sorted(1e3 * step[name] for step in steps)[int(SHARE * len(steps))] for name in names}


def timed_step(llm: LLM, kernels: KernelTime) -> dict[str, float]:
    """Seconds of one step."""
    engine = llm.engine
    before, computed = asdict(engine.stats.times), dict(kernels.seconds)
    start = time.perf_counter()
    engine.step()
    total = time.perf_counter() - start
    after = asdict(engine.stats.times)
    step = {phase: after[phase] - before[phase] - (kernels.seconds[phase] - computed[phase]) for phase in PHASES}
    step["host"] = total - sum(kernels.seconds.values()) + sum(computed.values())
    step["step"] = total
    return step


def main() -> None:
    """Measure every configuration and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--num-seqs", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    kernels = best_kernels()
    if kernels is None:
        parser.error("the native kernels are not built; their time could not be taken out")
    kernel_time = KernelTime(kernels)
    results = []
    plain = LLM(arguments.model, max_model_len=2048, speculative_config=None)
    machine, level = describe_machine(plain.device), describe_kernels(plain)
    dtype = str(plain.dtype).removeprefix("torch.")
    columns = (*PHASES, "host", "step")
    print(f"{machine}\n\nms of a step, {arguments.model}, {dtype}, kernels: {level}")
    print(f"{'config':8} {'seqs':>4} {'temp':>4} " + " ".join(f"{name:>9}" for name in columns))
    for name in arguments.configs:
        llm = plain.with_speculation(CONFIGS[name])
        for num_seqs in arguments.num_seqs:
            for temperature in arguments.temperatures:
                found = measure(llm, kernel_time, num_seqs, arguments.steps, temperature)
                results.append({"config": name, "num_seqs": num_seqs, "temperature": temperature, **found})
                values = " ".join(f"{found[column]:9.3f}" for column in columns)
                print(f"{name:8} {num_seqs:4} {temperature:4.1f} {values}", flush=True)
    if arguments.json:
        report = {"machine": machine, "dtype": dtype, "kernels": level, "results": results}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
