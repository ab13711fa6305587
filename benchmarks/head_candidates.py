"""What the head's kernel pays for finding each row's likeliest tokens, and what looking for them afterwards would cost.

Run: python -m benchmarks.head_candidates [--vocab 49152] [--width 576] [--rows 1 8 32] [--repeats 300] [--json FILE]
Each round times the product alone and with 1, 8 and 16 candidates, in random order, so that all see the same
machine; given are medians in microseconds, and the median of the rounds' differences, divided by the rows.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from forerun.bench.machine import describe_machine
from forerun.core.batch import MOST_CANDIDATES
from forerun.models.packing import Packing
from forerun.ops.native.layers import PackedHead
from forerun.ops.native.library import load_kernels

COUNTS = (1, 8, MOST_CANDIDATES)


def microseconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - started)


def each_argmax(logits: npt.NDArray[np.float32]) -> list[int]:
    """What greedy decoding takes, found in stored logits."""
    return [int(row.argmax()) for row in logits]


def measure(head: PackedHead, rows: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` rounds: the product, what each number of candidates adds to a row, and NumPy's argmax."""
    calls: dict[int, Callable[[], object]] = {0: lambda: head(rows)}
    calls |= {count: functools.partial(head.with_candidates, rows, count) for count in COUNTS}
    times: dict[int, list[float]] = {count: [] for count in calls}
    argmax: list[float] = []
    shuffled = random.Random(0)
    for _ in range(repeats):
        argmax.append(microseconds(functools.partial(each_argmax, head(rows).numpy())) / len(rows))
        head(rows)  # wakes the workers, so that the round's first call is like the others
        for count in shuffled.sample(list(calls), len(calls)):
            times[count].append(microseconds(calls[count]))
    added = {
        count: statistics.median(found - alone for found, alone in zip(times[count], times[0], strict=True))
        for count in COUNTS
    }
    return {
        "product": statistics.median(times[0]),
        "argmax_per_row": statistics.median(argmax),
        "added_per_row": {count: value / len(rows) for count, value in added.items()},
    }


def main() -> None:
    """Measure each number of rows and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    kernels = load_kernels()
    if kernels is None:
        parser.error("the native kernels are not built, or FORERUN_CPU_KERNELS is off")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(arguments.vocab, arguments.width, generator=generator).bfloat16()
    head = PackedHead(Packing.choose(kernels, dtype=torch.bfloat16).linear(weight))
    machine = describe_machine(torch.device("cpu"))
    print(f"{machine}\n\nmicroseconds, head of {arguments.vocab} x {arguments.width} in bf16, {kernels.level}")
    print(f"{'rows':>4} {'product':>9} {'argmax/row':>11} " + " ".join(f"{f'top {k}/row':>11}" for k in COUNTS))
    results = []
    for num_rows in arguments.rows:
        found = measure(head, torch.randn(num_rows, arguments.width, generator=generator), arguments.repeats)
        results.append({"rows": num_rows, **found})
        added = " ".join(f"{found['added_per_row'][k]:11.2f}" for k in COUNTS)
        print(f"{num_rows:4} {found['product']:9.1f} {found['argmax_per_row']:11.2f} {added}")
    if arguments.json:
        report = {"machine": machine, "kernels": kernels.level, "vocab": arguments.vocab, "width": arguments.width}
        arguments.json.write_text(json.dumps({**report, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
