"""The real runs: servers loaded by `forerun bench serve`, the machine's speed probed before and after each run."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.serving import FORERUN, RunningServer, serving
from benchmarks.simulation_accuracy.processor_time import others_time
from benchmarks.simulation_accuracy.speed import Slowness, SpeedProbe
from forerun.bench.instruments import BandwidthProbe

NUM_WARMUPS = 3
SETTLED = 0.1  # between two probes, before a server's first run
MOST_PROBES = 5  # until then


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

    def settled(self) -> MachineSpeed:
        """The machine's speed once it is about the same twice: a server that has just started still warms up."""
        now = self.measure()
        for _ in range(MOST_PROBES - 1):
            before, now = now, self.measure()
            if now.slowness.change_since(before.slowness) <= SETTLED:
                break
        return now


@dataclass(frozen=True, slots=True)
class LoadedServer:
    """A server with one configuration, alone on the machine: as nobody else has leased its cores, its threads are bound to them."""

    server: RunningServer

    @classmethod
    @contextmanager
    def of(cls, options: Serving, config: str) -> Iterator[LoadedServer]:
        """Start a server, and stop it at the end."""
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(*options.words(config), log=Path(folder) / "server.log") as server,
        ):
            yield cls(server)

    def measure(
        self, run: RealRun, prompts: Sequence[str], *, max_tokens: int, before: MachineSpeed, probe: MachineProbe
    ) -> tuple[dict[str, Any], MachineSpeed]:
        """Send one load; what `forerun bench serve` says of each request with the machine's speed around it, and the speed after it."""
        with others_time([self.server.process]) as others:
            found = _send(run, self.server, prompts, max_tokens)
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
