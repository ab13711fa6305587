"""The real runs: servers loaded by `forerun bench serve`, the machine's speed probed before and after each run."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.serving import FORERUN, RunningServer, serving
from benchmarks.simulation_accuracy.processor_time import others_time
from benchmarks.simulation_accuracy.speed import Slowness, SpeedProbe
from forerun.bench.instruments import BandwidthProbe

NUM_WARMUPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """One load on a server with one configuration, in one of the rounds.

    `share` is the load's rate over what the simulator says that the configuration can serve.
    """

    config: str
    load: str
    round: int
    share: float
    rate: float
    burstiness: float
    num_requests: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.config}-{self.load}-{self.round}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What serves: the model, its limits, and a speculative_config for each configuration."""

    model: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    configs: Mapping[str, Mapping[str, Any] | None]

    def words(self, config: str) -> list[str]:
        """The arguments of `forerun serve`."""
        speculative = self.configs[config]
        return [
            self.model,
            *("--max-model-len", str(self.max_model_len)),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *(["--no-speculation"] if speculative is None else ["--speculative-config", json.dumps(speculative)]),
        ]


class MachineSpeed(NamedTuple):
    """What a probe says."""

    slowness: Slowness
    bytes_per_second: float  # of memory


class MachineProbe:
    """What is probed between runs."""

    def __init__(self, speed: SpeedProbe, memory: BandwidthProbe) -> None:
        self._speed = speed
        self._memory = memory

    def measure(self) -> MachineSpeed:
        """The machine's speed now."""
        return MachineSpeed(self._speed.measure(), self._memory.measure())


class Servers:
    """A server for each configuration, all at once: those that nobody asks anything wait."""

    def __init__(self, options: Serving, configs: Sequence[str]) -> None:
        self._options = options
        self._configs = configs
        self._stack = ExitStack()
        self._running: dict[str, RunningServer] = {}

    def __enter__(self) -> Servers:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for config in self._configs:
                server = serving(*self._options.words(config), log=folder / f"{config}.log")
                self._running[config] = stack.enter_context(server)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(
        self, run: RealRun, prompts: Sequence[str], *, max_tokens: int, before: MachineSpeed, probe: MachineProbe
    ) -> tuple[dict[str, Any], MachineSpeed]:
        """Send one load; what `forerun bench serve` says of each request with the machine's speed around it, and the speed after it."""
        server = self._running[run.config]
        with others_time([one.process for one in self._running.values()]) as others:
            found = _send(run, server, prompts, max_tokens)
        after = probe.measure()
        kept = ("input_lens", "output_lens", "ttfts", "latencies", "start_times", "queue_times", "itls")
        speculation = {key: value for key, value in found.items() if key.startswith("spec_decode_")}
        record = {
            **asdict(run),
            "slowness": [asdict(one.slowness) for one in (before, after)],
            "gigabytes_per_second": (before.bytes_per_second + after.bytes_per_second) / 2e9,
            "others_cores": others.cores,
            **{key: found[key] for key in (*kept, "duration", "output_throughput")},
            **speculation,
        }
        return record, after


def is_disturbed(record: Mapping[str, Any], most_others: float) -> bool:
    """Whether other programs kept more than so many cores busy during a run, on average."""
    return bool(record["others_cores"] > most_others)


def _send(run: RealRun, server: RunningServer, prompts: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """What `forerun bench serve` says of one load."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dataset, result = folder / "prompts.jsonl", folder / "result.json"
        dataset.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        options = {
            "--base-url": server.url,
            "--backend": "openai-chat",
            "--dataset-name": "custom",
            "--dataset-path": dataset,
            "--custom-output-len": max_tokens,
            "--num-prompts": run.num_requests,
            "--num-warmups": NUM_WARMUPS,
            "--request-rate": run.rate,
            "--burstiness": run.burstiness,
            "--temperature": 0,
            "--energy-idle-seconds": 0,
            "--output-json": result,
            "--result-filename": folder / "detailed.json",
        }
        words = [str(word) for option in options.items() for word in option]
        flags = ("--disable-shuffle", "--disable-tqdm", "--save-result", "--save-detailed")
        subprocess.run([*FORERUN, "bench", "serve", *words, *flags], check=True, capture_output=True)
        found: dict[str, Any] = json.loads(result.read_text())
    assert found["completed"] == run.num_requests, f"{found['failed']} requests failed"
    return found
