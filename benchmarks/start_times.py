"""How long a start takes: `forerun generate` as a process, loading alone, the memory of both, and what pages cost a token.

A model's first start packs its weights and keeps them, the second maps them; "not kept" is with the cache turned off. The
cold cache of a disk is not measured: files are in the system's cache after the first round, which is not counted.

Run: python -m benchmarks.start_times [--model NAME] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.core.cache_folder import cache_folder
from forerun.core.cpu_name import describe_processor

GENERATE = [
    *(sys.executable, "-c", "from forerun.cli.program import program; program()"),
    *("generate", "{model}", "The sea is", "--max-tokens", "8"),
]
IMPORT_TORCH = [sys.executable, "-c", "import torch"]
LOAD = """
import json, sys, time
from forerun.llm import LLM
start = time.perf_counter()
llm = LLM(sys.argv[1])  # kept, or taking it apart would count
print(json.dumps(time.perf_counter() - start))
"""
DECODE = """
import json, mmap, statistics, sys, time
from forerun import SamplingParams
from forerun.llm import LLM
from forerun.ops.native import memory
pages, read_only = sys.argv[2], memory._read_only
def in_small_pages(mapped):
    mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return read_only(mapped)
if pages == "copied":
    memory._is_in_huge_pages = lambda mapped, address: False
if pages == "mapped, small pages":
    memory._gives_huge_pages, memory._read_only = (lambda: False), in_small_pages
llm = LLM(sys.argv[1], speculative_config=None)
params, times = SamplingParams(max_tokens=64, ignore_eos=True), []
for _ in range(6):
    start = time.perf_counter()
    llm.generate("The sea is", params, use_tqdm=False)
    times.append((time.perf_counter() - start) / 64)
print(json.dumps(statistics.median(times[1:])))
"""
PAGES = ("mapped", "copied", "mapped, small pages")


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended."""

    output: str
    seconds: float
    peak_bytes: int


def run(command: list[str], cache: Path, *, gigabytes: str = "") -> Ended:
    """Run a command with this cache folder; `gigabytes` as of FORERUN_PACKED_CACHE_GB."""
    environment = os.environ | {"FORERUN_CACHE": str(cache), "FORERUN_PACKED_CACHE_GB": gigabytes}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed is compiled already
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[-3:]}: exit code {process.returncode}")
    return Ended(output, seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def measure(model: str, cache: Path) -> dict[str, Any]:
    """One round of everything, as {figure: value}."""
    generate = [word.format(model=model) for word in GENERATE]
    load = [sys.executable, "-c", LOAD, model]
    starts: dict[str, Callable[[list[str]], Ended]] = {
        "not kept": lambda command: run(command, cache, gigabytes="0"),
        "first": lambda command: run(command, _emptied(cache)),
        "second": lambda command: run(command, cache),
    }
    found: dict[str, Any] = {"import torch, seconds": run(IMPORT_TORCH, cache).seconds}
    for name, start in starts.items():
        ended = start(generate)
        found |= {f"generate, {name}, seconds": ended.seconds, f"generate, {name}, peak bytes": ended.peak_bytes}
    for name, start in starts.items():
        found[f"load, {name}, seconds"] = json.loads(start(load).output)
    for pages in PAGES:
        ended = run([sys.executable, "-c", DECODE, model, pages], cache)
        found[f"a token, {pages}, seconds"] = json.loads(ended.output)
    return found


def _emptied(cache: Path) -> Path:
    """The cache folder without packed weights."""
    shutil.rmtree(cache / "packed", ignore_errors=True)
    return cache


def main() -> None:
    """Measure several rounds and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forerun-start-") as folder:
        cache = Path(folder)
        (cache / "models").symlink_to(cache_folder() / "models")
        measure(arguments.model, cache)
        rounds = [measure(arguments.model, cache) for _ in range(arguments.rounds)]
    medians = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    print(f"{describe_processor()}, {arguments.model}, medians of {len(rounds)} rounds\n")
    for name, value in medians.items():
        shown = f"{value / 1e6:9.0f} MB" if name.endswith("bytes") else f"{value:9.4f} s"
        print(f"{name.rpartition(', ')[0] if not name.endswith('bytes') else name.removesuffix(' bytes'):32} {shown}")
    if arguments.json:
        result = {
            "processor": describe_processor(),
            "cores": os.cpu_count(),
            "python": sys.version.split()[0],
            "model": arguments.model,
            "medians": medians,
            "rounds": rounds,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
