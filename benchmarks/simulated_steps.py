"""How many steps a second the engine's policy makes over a simulated executor, on one core, without torch.

Run: python -m benchmarks.simulated_steps [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

from forerun import SamplingParams
from forerun.core.cpu_name import describe_processor
from forerun.engine.simulation import SimulationSettings, simulated_engine
from forerun.engine.speculation import FixedLength
from forerun.executor.simulated_text import ConditionalAcceptance

NUM_ROUNDS = 5
CONFIGS = {
    "plain": (None, FixedLength(num_speculative_tokens=0)),
    "K=4": (ConditionalAcceptance((0.8, 0.7, 0.7, 0.6)), FixedLength(num_speculative_tokens=4)),
}


def measure(name: str, num_seqs: int, num_steps: int) -> float:
    """Decode steps per second with `num_seqs` sequences that never end."""
    drafting, control = CONFIGS[name]
    settings = SimulationSettings(num_blocks=60_000, max_model_len=200_000, drafting=drafting)
    engine, source = simulated_engine(settings, control), random.Random(0)
    sampling = SamplingParams(max_tokens=100_000, ignore_eos=True)
    for i in range(num_seqs):
        engine.add_request(str(i), [source.randrange(settings.vocab_size) for _ in range(100)], sampling)
    for _ in range(20):
        engine.step()
    start = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    return num_steps / (time.perf_counter() - start)


def main() -> None:
    """Measure each configuration in turn, several times, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cells = [(name, num_seqs) for name in CONFIGS for num_seqs in (1, 8, 32)]
    found: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
    for _ in range(NUM_ROUNDS):
        for cell in cells:
            found[cell].append(measure(*cell, arguments.steps))
    assert "torch" not in sys.modules, "the simulation is meant to do without"
    print(f"{describe_processor()}, Python {sys.version.split()[0]}\n\n{'config':8} {'seqs':>4} {'steps/s':>8}")
    for (name, num_seqs), rates in found.items():
        print(f"{name:8} {num_seqs:4} {statistics.median(rates):8.0f}")
    if arguments.json:
        results = [
            {"config": name, "num_seqs": n, "steps_per_second": statistics.median(rates), "rounds": rates}
            for (name, n), rates in found.items()
        ]
        arguments.json.write_text(json.dumps({"processor": describe_processor(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
