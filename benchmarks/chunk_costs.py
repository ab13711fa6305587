"""What serving costs besides computing: processor time per streamed chunk of `forerun serve` and behind Dynamo.

Run: python -m benchmarks.chunk_costs [--systems serve dynamo] [--streams 8] [--tokens 512] [--rounds 5] [--json FILE]

A model of one thin layer with random weights stands in for a real one, so that computing weighs little; what the
engine alone takes for the same requests, in this process, is subtracted. Streams run at once, one token a step and
chunk; the clients' processor time is not counted. Dynamo needs an environment of its own: python -m benchmarks.peers
install dynamo_worker. The tokenizer is that of smollm2-135m.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.dynamo import ENVIRONMENT, NAME, dynamo_serving
from benchmarks.peers.install import DEFAULT_FOLDER, python_in
from benchmarks.serving import serving
from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_machine
from forerun.models.store import resolve_model

THIN = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
PROMPT = list(range(1000, 1016))
OPTIONS = ("--load-format=dummy", "--no-speculation", "--max-model-len=4096")


@dataclass(frozen=True, slots=True)
class Served:
    """A system that serves the model: its address, and the processes behind it by their part."""

    url: str
    processes: dict[str, list[psutil.Process]]

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time of each part so far."""
        return {
            part: sum(sum(process.cpu_times()[:2]) for process in processes)
            for part, processes in self.processes.items()
        }


def save_thin_model(folder: Path) -> Path:
    """A folder with the default model's tokenizer and a configuration of one thin layer."""
    source = resolve_model("smollm2-135m")
    for file in source.iterdir():
        if file.suffix in (".json", ".txt", ".jinja") and "safetensors" not in file.name:
            shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | THIN))
    return folder


def stream(url: str, model: str, num_tokens: int) -> int:
    """Ask for one stream; how many chunks with tokens came."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    body = {"model": model, "prompt": PROMPT, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    body |= {"temperature": 1.0, "seed": 1}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    num_chunks = sum(line.startswith(b"data: {") for line in response)
    connection.close()
    return num_chunks


def measure(served: Served, model: str, num_streams: int, num_tokens: int) -> dict[str, float]:
    """Milliseconds of processor time per chunk, by part."""
    before = served.cpu_seconds()
    with ThreadPoolExecutor(num_streams) as clients:
        num_chunks = sum(clients.map(lambda _: stream(served.url, model, num_tokens), range(num_streams)))
    time.sleep(0.2)
    after = served.cpu_seconds()
    return {part: 1e3 * (after[part] - before[part]) / num_chunks for part in before}


def engine_alone(llm: LLM, num_streams: int, num_tokens: int) -> float:
    """Milliseconds of processor time per token of the same requests without anybody to serve."""
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    before = time.process_time()
    llm.generate([PROMPT] * num_streams, sampling, use_tqdm=False)
    return 1e3 * (time.process_time() - before) / (num_streams * num_tokens)


@contextmanager
def plain_server(model: str, folder: Path) -> Iterator[Served]:
    """`forerun serve`."""
    with serving(model, *OPTIONS, f"--served-model-name={NAME}", log=folder / "serve.log") as server:
        yield Served(server.url, {"server": [server.process]})


@contextmanager
def behind_dynamo(model: str, folder: Path) -> Iterator[Served]:
    """Dynamo's frontend with one worker."""
    python = python_in(ENVIRONMENT, DEFAULT_FOLDER)
    with dynamo_serving(python, model, *OPTIONS, folder=folder, num_workers=1) as dynamo:
        processes = {"frontend": [dynamo.frontend], "worker": [worker.process for worker in dynamo.workers]}
        yield Served(dynamo.url, processes)


SYSTEMS: dict[str, Callable[[str, Path], Any]] = {"serve": plain_server, "dynamo": behind_dynamo}


def run(systems: Sequence[str], num_streams: int, num_tokens: int, num_rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds per chunk by system and part; "engine" is the engine alone. Rounds are interleaved."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ("engine", *systems)}
    with tempfile.TemporaryDirectory() as scratch:
        model = str(save_thin_model(Path(scratch)))
        llm = LLM(model, load_format="dummy", speculative_config=None, max_model_len=4096)
        for number in range(num_rounds + 1):
            figures = {"engine": {"engine": engine_alone(llm, num_streams, num_tokens)}}
            for name in systems:
                folder = Path(scratch) / f"{name}-{number}"
                folder.mkdir()
                with SYSTEMS[name](model, folder) as served:
                    measure(served, NAME, num_streams, num_tokens)  # warms up
                    figures[name] = measure(served, NAME, num_streams, num_tokens)
            if number:  # the first round warms up this process
                for name, parts in figures.items():
                    found[name].append(parts)
    return {
        name: {part: statistics.median(some[part] for some in rounds) for part in rounds[0]}
        for name, rounds in found.items()
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="*", choices=[*SYSTEMS], default=[*SYSTEMS])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = run(arguments.systems, arguments.streams, arguments.tokens, arguments.rounds)
    alone = found["engine"]["engine"]
    table = Table("system", "part", "ms of processor per chunk", "without the engine")
    for name, parts in found.items():
        for part, milliseconds in parts.items():
            has_engine = part in ("server", "worker")
            table.add_row(name, part, f"{milliseconds:.3f}", f"{milliseconds - alone * has_engine:.3f}")
    Console().print(table)
    if arguments.json is not None:
        figures = {
            "machine": describe_machine(torch.device("cpu")),
            "streams": arguments.streams,
            "milliseconds_per_chunk": found,
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
