"""Measures the server's overhead: 16 clients over HTTP against the same requests offline, in turn, on one machine.

Run: python -m benchmarks.server_throughput [--model smollm2-135m] [--rounds 5] [--json FILE]

Each round runs the same conversations with the same settings twice: all at once in an `LLM` of this
process (`forerun bench throughput`), and by `forerun bench serve` with 16 concurrent streams to a `forerun
serve`, both in processes of their own. Clients share the machine with the server, so their processor time is
reported too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from benchmarks.serving import FORERUN, RunningServer, serving
from forerun import LLM
from forerun.bench.instruments import Clock
from forerun.bench.machine import describe_kernels, describe_machine
from forerun.bench.offline import measure_throughput
from forerun.bench.prompts import WORKLOADS, encode_prompt
from forerun.bench.sharegpt import SampledRequest
from forerun.bench.workloads import ThroughputWorkload

T = TypeVar("T")

SUFFIX = {"method": "suffix", "suffix_decoding_max_cached_requests": 0}
"""Without a pool of past answers, since later rounds generate the same texts again."""

NUMBER_FORMATS = (".0f", ".0f", ".3f", ".2f", ".2f", ".2f")
"""The formats of the table's columns."""

SPECULATION: dict[str, dict[str, Any] | None] = {"plain": None, "suffix": SUFFIX}


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Output tokens per second offline and served, and seconds of processor time of all processes."""

    config: str
    offline: float
    served: float
    offline_cpu_seconds: float
    server_cpu_seconds: float
    client_cpu_seconds: float

    @property
    def ratio(self) -> float:
        """Served / offline throughput."""
        return self.served / self.offline


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """One configuration, offline and served, on the same prompts."""

    config: str
    llm: LLM
    server: RunningServer
    prompts: Sequence[str]
    max_tokens: int
    concurrency: int
    folder: Path

    def offline(self) -> float:
        """Output tokens per second of an LLM with all requests at once."""
        tokenizer = self.llm.get_tokenizer()
        requests = [SampledRequest(encode_prompt(tokenizer, prompt), self.max_tokens) for prompt in self.prompts]
        workload = ThroughputWorkload(num_prompts=len(requests), temperature=0.0)
        return measure_throughput(self.llm, workload, requests).output_tokens_per_second

    def served(self) -> dict[str, Any]:
        """The result of `forerun bench serve` with as many clients as the server runs sequences."""
        prompts, result = self.folder / "prompts.jsonl", self.folder / "result.json"
        prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in self.prompts))
        options = {
            "--base-url": self.server.url,
            "--backend": "openai-chat",
            "--dataset-name": "custom",
            "--dataset-path": prompts,
            "--custom-output-len": self.max_tokens,
            "--num-prompts": len(self.prompts),
            "--max-concurrency": self.concurrency,
            "--temperature": 0,
            "--energy-idle-seconds": 0,
            "--output-json": result,
        }
        words = [str(word) for option in options.items() for word in option]
        subprocess.run(
            [*FORERUN, "bench", "serve", *words, "--disable-shuffle", "--ignore-eos", "--disable-tqdm"],
            check=True,
            capture_output=True,
        )
        found: dict[str, Any] = json.loads(result.read_text())
        assert found["completed"] == len(self.prompts), f"{found['failed']} requests failed"
        return found

    def round(self, *, server_first: bool) -> Round:
        """Measure both, one after the other."""
        offline = None if server_first else _with_seconds(self.offline, time.process_time)
        found, server_cpu_seconds = _with_seconds(self.served, self.server.cpu_seconds)
        offline = offline or _with_seconds(self.offline, time.process_time)
        return Round(
            config=self.config,
            offline=offline[0],
            served=found["output_throughput"],
            offline_cpu_seconds=offline[1],
            server_cpu_seconds=server_cpu_seconds,
            client_cpu_seconds=found["environment"]["client"]["cpu_seconds"],
        )


def _with_seconds(work: Callable[[], T], clock: Clock) -> tuple[T, float]:
    """The result of `work`, and the time that it took by `clock`."""
    start = clock()
    return work(), clock() - start


def main() -> None:
    """Measure every configuration and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-prompts", type=int, default=64, help="requests of a round")
    parser.add_argument("--max-tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--configs", nargs="*", choices=[*SPECULATION], default=[*SPECULATION])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    messages = [text for texts in WORKLOADS.values() for text in texts]
    prompts = [messages[i % len(messages)] for i in range(arguments.num_prompts)]
    settings: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": arguments.concurrency}
    plain = LLM(arguments.model, **settings, speculative_config=None)
    rounds: list[Round] = []
    for config in arguments.configs:
        speculation = SPECULATION[config]
        words = [arguments.model, *(f"--{name.replace('_', '-')}={value}" for name, value in settings.items())]
        if not speculation:
            words.append("--no-speculation")
        else:
            words.append(f"--speculative-config={json.dumps(speculation)}")
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(*words, "--disable-log-stats", log=Path(folder) / "log") as server,
        ):
            contest = Contest(
                config=config,
                llm=plain.with_speculation(speculation),
                server=server,
                prompts=prompts,
                max_tokens=arguments.max_tokens,
                concurrency=arguments.concurrency,
                folder=Path(folder),
            )
            contest.round(server_first=False)  # warms both up: their prefix caches hold the prompts from then on
            rounds += [contest.round(server_first=bool(number % 2)) for number in range(arguments.rounds)]
    Console().print(_table(rounds))
    if arguments.json:
        report = {
            "machine": describe_machine(plain.device),
            "kernels": describe_kernels(plain),
            "dtype": str(plain.dtype).removeprefix("torch."),
            "model": arguments.model,
            "num_prompts": arguments.num_prompts,
            "max_tokens": arguments.max_tokens,
            "concurrency": arguments.concurrency,
            "speculative_config": SPECULATION,
            "rounds": [{**asdict(one), "ratio": one.ratio} for one in rounds],
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def _table(rounds: Sequence[Round]) -> Table:
    """Medians of each configuration's rounds."""
    table = Table("config", "offline tok/s", "served tok/s", "ratio", "offline CPU s", "server CPU s", "clients CPU s")
    for config in dict.fromkeys(one.config for one in rounds):
        columns = zip(
            *(
                (
                    one.offline,
                    one.served,
                    one.ratio,
                    one.offline_cpu_seconds,
                    one.server_cpu_seconds,
                    one.client_cpu_seconds,
                )
                for one in rounds
                if one.config == config
            ),
            strict=True,
        )
        medians = map(statistics.median, columns)
        table.add_row(config, *(f"{value:{form}}" for value, form in zip(medians, NUMBER_FORMATS, strict=True)))
    return table


if __name__ == "__main__":
    main()
