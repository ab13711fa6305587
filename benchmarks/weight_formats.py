"""Compares a model's weights in three formats: bf16 in 16 bits, bf16 in 12 bits (lossless), and int8.

Run: python -m benchmarks.weight_formats [--model smollm2-135m] [--rows 1 2 4 8 16] [--context 256] [--json FILE]
Prints median milliseconds of whole forward passes, measured in turn in every round, the memory's bandwidth, and
whether the logits of both bf16 formats are bit-identical.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.targets import llm_on
from forerun import LLM
from forerun.bench.curve import NUM_WARMUP_ROUNDS
from forerun.bench.instruments import BandwidthProbe, Stopwatch
from forerun.bench.machine import describe_kernels, describe_machine
from forerun.bench.passes import PassShape, random_sequences
from forerun.config.settings import EngineSettings
from forerun.models.loader import LOADERS
from forerun.models.packing import Packing
from forerun.models.store import resolve_model
from forerun.ops.native.formats import WEIGHT_FORMATS
from forerun.ops.native.library import Kernels, load_kernels

PLAIN, CODED, INT8 = "bf16 in 16 bits", "bf16 in 12 bits", "int8"


def load(kernels: Kernels, settings: EngineSettings) -> dict[str, LLM]:
    """The model in each format."""
    formats = {PLAIN: "bf16", CODED: "bf16-12bit", INT8: "int8"}
    read, path = LOADERS[settings.load_format], resolve_model(settings.model)
    return {
        name: llm_on(
            read(
                path,
                dtype=torch.bfloat16,
                device=torch.device("cpu"),
                packing=Packing(kernels, WEIGHT_FORMATS[weight_format]),
            ),
            settings,
            kernels,
        )
        for name, weight_format in formats.items()
    }


def measure(llms: dict[str, LLM], kernels: Kernels, shapes: list[PassShape], repeats: int) -> dict[str, Any]:
    """Measure milliseconds by format and number of rows, and the memory's bandwidth, in each round."""
    stopwatch = Stopwatch(torch.device("cpu"))
    probe = BandwidthProbe(stopwatch, read=kernels.read)
    speeds: list[float] = []
    times: dict[str, dict[int, list[float]]] = {name: {shape.rows: [] for shape in shapes} for name in llms}
    with ExitStack() as stack:
        passes = {name: stack.enter_context(random_sequences(llm, shapes)) for name, llm in llms.items()}
        batches = {shape: passes[PLAIN].batch(shape) for shape in shapes}
        for index in range(NUM_WARMUP_ROUNDS + repeats):
            speed = probe.measure() / 1e9
            taken = [
                (name, shape.rows, 1e3 * stopwatch.seconds(partial(of.forward, batches[shape])))
                for shape in shapes
                for name, of in passes.items()
            ]
            if index >= NUM_WARMUP_ROUNDS:
                speeds.append(speed)
                for name, rows, milliseconds in taken:
                    times[name][rows].append(milliseconds)
        same = [torch.equal(passes[PLAIN].forward(batch), passes[CODED].forward(batch)) for batch in batches.values()]
    return {"gigabytes_per_second": speeds, "milliseconds": times, "bf16_bits_are_equal": all(same)}


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto", choices=list(LOADERS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    kernels = load_kernels()
    if kernels is None:
        parser.error("the native CPU kernels are not built")
    settings = EngineSettings(
        model=arguments.model,
        load_format=arguments.load_format,
        max_model_len=arguments.context + max(arguments.rows),
        kv_cache_memory_bytes=1 << 28,
    )
    llms = load(kernels, settings)
    shapes = [PassShape(context=arguments.context, num_sequences=1, rows=rows) for rows in arguments.rows]
    result = measure(llms, kernels, shapes, arguments.repeats)
    machine, level = describe_machine(torch.device("cpu")), describe_kernels(llms[PLAIN])
    print(
        f"{machine}\n{arguments.model}, kernels: {level}; context {arguments.context}, medians of {arguments.repeats} rounds"
    )
    print(f"memory {statistics.median(result['gigabytes_per_second']):.1f} GB/s")
    print(
        f"{'rows':>4} "
        + " ".join(f"{name:>16}" for name in llms)
        + f" {'12 to 16 bits':>14} {'int8 to 16':>11} {'int8 to 12':>11}"
    )
    for rows in arguments.rows:
        rounds = {name: times[rows] for name, times in result["milliseconds"].items()}
        medians = " ".join(f"{statistics.median(values):13.2f} ms" for values in rounds.values())
        pairs = [(CODED, PLAIN), (INT8, PLAIN), (INT8, CODED)]
        ratios = [
            statistics.median(a / b for a, b in zip(rounds[one], rounds[other], strict=True)) for one, other in pairs
        ]
        print(f"{rows:4} {medians} {ratios[0]:14.2f} {ratios[1]:11.2f} {ratios[2]:11.2f}")
    print(f"logits of both bf16 formats bit for bit equal: {'yes' if result['bf16_bits_are_equal'] else 'NO'}")
    if arguments.json:
        report = {"model": arguments.model, "machine": machine, "kernels": level, **result}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
