"""How many requests a second a simulation serves, on one core: a fleet of replicas near its capacity.

Run: python -m benchmarks.simulation_speed [--requests 100000] [--replicas 16] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

from forerun.core.cpu_name import describe_processor
from forerun.engine.simulation import SimulationSettings, linear_decode_seconds
from forerun.engine.speculation import FixedLength
from forerun.executor.simulated_text import ConditionalAcceptance
from forerun.plan.load import Load
from forerun.plan.simulation.fleet import Fleet
from forerun.plan.simulation.requests import synthetic_requests
from forerun.plan.simulation.simulate import simulate

ISL, OSL = 100, 300
RATE = 12.0  # requests per second and replica; about 20 run at once
CONFIGS = {"plain": 0, "K=3": 3}


def measure(name: str, num_requests: int, num_replicas: int) -> dict[str, float]:
    """Seconds of processor time for the requests, and what they came to."""
    requests = synthetic_requests(Load(rate=RATE * num_replicas, isl=ISL, osl=OSL), num_requests)
    settings = SimulationSettings(
        decode_seconds=linear_decode_seconds, drafting=ConditionalAcceptance((0.8, 0.7, 0.6)), num_blocks=4096
    )
    start = time.process_time()
    result = simulate(
        settings,
        requests,
        fleet=Fleet(replicas=num_replicas, routing="least-requests"),
        make_control=lambda: FixedLength(num_speculative_tokens=CONFIGS[name]),
    )
    seconds = time.process_time() - start
    return {
        "requests": num_requests,
        "processor_seconds": seconds,
        "requests_per_second": num_requests / seconds,
        "tokens_per_second": result.num_output_tokens / seconds,
        "microseconds_per_token": 1e6 * seconds / result.num_output_tokens,
        "simulated_seconds": result.seconds,
        "steps": sum(one.num_steps for one in result.replicas),
        "mean_running": sum(one.num_running for one in result.replicas) / num_replicas,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Measure each configuration and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=[*CONFIGS])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {name: measure(name, arguments.requests, arguments.replicas) for name in arguments.configs}
    assert "torch" not in sys.modules, "the simulation is meant to do without"
    print(
        f"{describe_processor()}, Python {sys.version.split()[0]}, {arguments.replicas} replicas, {ISL} + {OSL} tokens\n"
    )
    print(f"{'config':8} {'requests':>9} {'seconds':>8} {'requests/s':>10} {'µs/token':>9} {'running':>8} {'MB':>6}")
    for name, one in found.items():
        print(
            f"{name:8} {one['requests']:9} {one['processor_seconds']:8.1f} {one['requests_per_second']:10.0f} "
            f"{one['microseconds_per_token']:9.2f} {one['mean_running']:8.1f} {one['peak_memory_mb']:6.0f}"
        )
    if arguments.json:
        document = {
            "processor": describe_processor(),
            "replicas": arguments.replicas,
            "isl": ISL,
            "osl": OSL,
            "rate": RATE,
        }
        arguments.json.write_text(json.dumps(document | {"results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
