"""Disaggregated prefill: what handing KV over costs, and what a stream gains while a long prompt is read.

Run: python -m benchmarks.disaggregated [--model smollm2-135m] [--rounds 5] [--json FILE]
First the copies, per 1,000 prompt tokens, beside reading the prompt with all cores: out of the cache, through shared memory,
into another cache. Then, each in a fresh process and in turns: one engine on all cores with steps of at most 2048 and of at
most 128 rows, and two processes that share the cores. A stream decodes; a long prompt arrives; the pauses of the stream and
the time to the prompt's first token are measured. All texts are compared.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_machine
from forerun.core.outputs import StreamDelta
from forerun.deploy.disaggregated.channel import Channel
from forerun.deploy.disaggregated.llm import DisaggregatedLLM
from forerun.engine.client import EngineRequest
from forerun.engine.kv_transfer import export_kv, import_kv

CPU = torch.device("cpu")
PROMPT_TOKENS = 1536
STREAMED = 160
ARRIVES_AFTER = 40  # tokens of the stream
ONCE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
SETUPS: dict[str, dict[str, Any]] = {
    "one engine, 2048 rows": {"max_num_batched_tokens": 2048},
    "one engine, 128 rows": {"max_num_batched_tokens": 128},
    "two processes": {"prefill_threads": 1},
}


def long_prompt(number: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    return [(11 * place + 101 * number) % 997 + 5 for place in range(PROMPT_TOKENS)]


def measure_copies(model: str, rounds: int) -> dict[str, float]:
    """Median milliseconds per 1,000 prompt tokens of reading a prompt and of each copy, and the KV's megabytes."""
    reading = LLM(model, max_model_len=2048, speculative_config=None)
    answering = reading.with_speculation(None)
    own, other = (Channel(end) for end in socket.socketpair())
    taken: dict[str, list[float]] = {
        "read": [],
        "out of the cache": [],
        "through shared memory": [],
        "into the cache": [],
    }
    megabytes = 0.0
    for number in range(rounds + 1):
        prompt = long_prompt(number)
        marks = [time.perf_counter()]
        reading.generate([prompt], ONCE, use_tqdm=False)
        marks.append(time.perf_counter())
        kv = export_kv(reading.engine.parts, prompt)
        marks.append(time.perf_counter())
        own.send({}, kv.caches[0].tensors)
        message = other.receive()
        assert message is not None, "it was sent"
        marks.append(time.perf_counter())
        assert import_kv(answering.engine.parts, kv), "there is room"
        marks.append(time.perf_counter())
        megabytes = kv.num_bytes / 1e3 / len(kv.token_ids)
        for name, before, after in zip(taken, marks, marks[1:], strict=False):
            taken[name].append(1e6 * (after - before) / len(kv.token_ids))
    found = {name: statistics.median(times[1:]) for name, times in taken.items()}
    return found | {"megabytes": megabytes}


def measure_here(model: str, setup: str) -> dict[str, Any]:
    """Pauses of a stream while a long prompt is read, in this process; times in milliseconds."""
    settings = {"max_model_len": 2048, "speculative_config": None} | SETUPS[setup]
    llm = (DisaggregatedLLM if "prefill_threads" in settings else LLM)(model, **settings)
    llm.generate([long_prompt(1)], ONCE, use_tqdm=False)  # warm
    client = llm.client
    streamed = SamplingParams(temperature=0.0, max_tokens=STREAMED, ignore_eos=True)
    texts: dict[str, list[int]] = {"stream": [], "long": []}
    times: list[float] = []
    asked = answered = 0.0

    def submit(request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
        client.accept(EngineRequest(request_id=request_id, prompt_ids=prompt, sampling=sampling))
        client.submit(request_id)

    def note(delta: StreamDelta) -> None:
        nonlocal answered
        texts[delta.request_id] += delta.token_ids
        if delta.request_id == "stream":
            times.append(time.perf_counter())
        elif not answered:
            answered = time.perf_counter()

    submit("stream", long_prompt(2)[:16], streamed)
    while client.has_work:
        for delta in client.step().deltas:
            note(delta)
        if not asked and len(texts["stream"]) >= ARRIVES_AFTER:
            asked = time.perf_counter()
            submit("long", long_prompt(3), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    gaps = sorted(1e3 * (after - before) for before, after in zip(times, times[1:], strict=False))
    during = [
        1e3 * (after - before)
        for before, after in zip(times, times[1:], strict=False)
        if asked < after and before < answered
    ]
    return {
        "times": {
            "median pause": statistics.median(gaps),
            "longest pause": gaps[-1],
            "median pause while the prompt is read": statistics.median(during),
            "first token of the long prompt": 1e3 * (answered - asked),
        },
        "texts": texts,
    }


def measure(model: str, setup: str) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.disaggregated", "--model", model, "--here", setup]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure the copies, then every setup in turns, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", choices=SETUPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here is not None:
        print(json.dumps(measure_here(arguments.model, arguments.here)))
        return
    print(describe_machine(CPU))
    copies = measure_copies(arguments.model, arguments.rounds)
    print(f"per 1,000 prompt tokens ({copies['megabytes']:.1f} MB of KV):")
    for name, value in copies.items():
        if name != "megabytes":
            print(f"  {name:24}{value:9.2f} ms")
    runs: dict[str, list[dict[str, Any]]] = {setup: [] for setup in SETUPS}
    for turn in range(arguments.rounds):
        for setup in SETUPS if turn % 2 == 0 else reversed(SETUPS):
            runs[setup].append(measure(arguments.model, setup))
    texts = {json.dumps(one["texts"]) for found in runs.values() for one in found}
    print(
        f"a stream, and a prompt of {PROMPT_TOKENS} tokens that arrives; texts {'are equal' if len(texts) == 1 else 'DIFFER'}"
    )
    medians = {
        setup: {name: statistics.median(one["times"][name] for one in found) for name in found[0]["times"]}
        for setup, found in runs.items()
    }
    for setup, times in medians.items():
        print(f"  {setup}")
        for name, value in times.items():
            print(f"    {name:40}{value:9.1f} ms")
    if arguments.json:
        content = {"machine": describe_machine(CPU), "copies": copies, "runs": runs, "medians": medians}
        arguments.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
