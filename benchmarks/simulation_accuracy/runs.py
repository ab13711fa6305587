"""The real runs: a server for each, loaded by `forerun bench serve`, the memory's bandwidth probed before and after."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.serving import FORERUN, serving
from forerun.bench.instruments import BandwidthProbe
from forerun.plan.profile import write_json

NUM_WARMUPS = 6
AT_ONCE = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """One load on a server with one configuration.

    `share` is the load's rate over what the simulator says that the configuration can serve.
    """

    config: str
    load: str
    share: float
    rate: float
    burstiness: float
    num_requests: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.config}-{self.load}"


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


def measure(
    run: RealRun,
    serving_options: Serving,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    probe: BandwidthProbe,
    file: Path,
) -> None:
    """Serve one load, and keep what `forerun bench serve` says of each request, with the bandwidth, in a file."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        dataset, result = folder / "prompts.jsonl", folder / "result.json"
        dataset.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        before = probe.measure()
        with serving(*serving_options.words(run.config), log=folder / "log") as server:
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
        found = json.loads(result.read_text())
        assert found["completed"] == run.num_requests, f"{found['failed']} requests failed"
        kept = ("input_lens", "output_lens", "ttfts", "latencies", "start_times", "queue_times", "errors")
        details = {key: found[key] for key in (*kept, "itls", "duration", "output_throughput")}
        speculation = {key: value for key, value in found.items() if key.startswith("spec_decode_")}
        write_json(
            file,
            {
                "config": run.config,
                "load": run.load,
                "share": run.share,
                "rate": run.rate,
                "burstiness": run.burstiness,
                "gigabytes_per_second": fmean((before, probe.measure())) / 1e9,
                **details,
                **speculation,
            },
        )
