"""The results of a run, and their JSON files: the keys of the original benchmark, then some that it lacks.

Units are seconds, bytes and joules.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.experiment.engines import num_visible_gpus
from benchmarks.experiment.settings import Settings
from forerun.bench.machine import describe_machine
from forerun.errors import ConfigError

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answered prompt; times are since the start of its batch."""

    prompt_tokens: int
    generated_tokens: int
    ttft: float
    total_latency: float
    drafted: int
    accepted: int

    def to_json(self) -> dict[str, Any]:
        """The original benchmark's keys; the rate is null if nothing was drafted."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "total_tokens": self.prompt_tokens + self.generated_tokens,
            "ttft": self.ttft,
            "total_latency": self.total_latency,
            "acceptance_rate": rate(self.accepted, self.drafted),
            "drafts_generated": self.drafted,
            "drafts_accepted": self.accepted,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Prompts given together; `late` is how long they waited for the engine."""

    requests: list[Request]
    seconds: float
    late: float

    def to_json(self) -> dict[str, Any]:
        """The original benchmark's keys, and `late`."""
        num_tokens = sum(request.generated_tokens for request in self.requests)
        return {
            "batch_size": len(self.requests),
            "batch_latency": self.seconds,
            "total_tokens": num_tokens,
            "avg_ttft": statistics.fmean(request.ttft for request in self.requests),
            "avg_latency": statistics.fmean(request.total_latency for request in self.requests),
            "throughput": num_tokens / self.seconds,
            "requests": [request.to_json() for request in self.requests],
            "late": self.late,
        }


@dataclass(slots=True)
class Measured:
    """All batches of a run, with its time and memory."""

    batches: list[Batch] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    peak_gpu_bytes: int | None = None
    num_failed_drafts: int = 0

    @property
    def requests(self) -> list[Request]:
        """The requests of all batches."""
        return [request for batch in self.batches for request in batch.requests]

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(request.generated_tokens for request in self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens."""
        return sum(request.accepted for request in self.requests)

    @property
    def num_drafted(self) -> int:
        """Draft tokens."""
        return sum(request.drafted for request in self.requests)

    @property
    def throughput(self) -> float:
        """Generated tokens per second of the whole run, idle time included."""
        return self.num_tokens / self.seconds

    @property
    def busy_throughput(self) -> float:
        """Generated tokens per second of the time in which the engine was busy."""
        return self.num_tokens / sum(batch.seconds for batch in self.batches)

    def to_json(self, method: str) -> dict[str, Any]:
        """The original's keys, then percentiles, memory and time; the acceptance rate is a ratio of sums."""
        requests = self.requests
        ttft, latency = [one.ttft for one in requests], [one.total_latency for one in requests]
        later = sum(one.generated_tokens - 1 for one in requests)
        return {
            "method": method,
            "total_requests": len(requests),
            "total_batches": len(self.batches),
            "total_duration": self.seconds,
            "total_tokens": self.num_tokens,
            "total_prompt_tokens": self.num_prompt_tokens,
            "overall_throughput": self.throughput,
            "avg_ttft": statistics.fmean(ttft),
            "avg_latency": statistics.fmean(latency),
            "avg_acceptance_rate": rate(self.num_accepted, self.num_drafted),
            "batches": [batch.to_json() for batch in self.batches],
            "busy_throughput": self.busy_throughput,
            "median_ttft": statistics.median(ttft),
            "p99_ttft": percentile(ttft, 99),
            "median_latency": statistics.median(latency),
            "p99_latency": percentile(latency, 99),
            "avg_tpot": sum(one.total_latency - one.ttft for one in requests) / later if later else None,
            "drafts_generated": self.num_drafted,
            "drafts_accepted": self.num_accepted,
            "num_failed_drafts": self.num_failed_drafts,
            "memory": {"peak_rss_bytes": self.peak_bytes, "peak_gpu_bytes": self.peak_gpu_bytes},
            "cpu_seconds": self.cpu_seconds,
        }


def rate(accepted: int, drafted: int) -> float | None:
    """Accepted / drafted tokens, or None if nothing was drafted."""
    return accepted / drafted if drafted else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` percent of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def output_file(settings: Settings, key: str) -> Path:
    """OUTPUT_FILE with a run's key before its ending."""
    file = Path(settings.output_file).expanduser()
    return file.with_name(f"{file.name.removesuffix('.json')}_{key}.json")


def check_output(file: Path) -> None:
    """Refuse a folder that cannot be written to, before anything is measured.

    Raises:
        ConfigError: the folder does not exist or cannot be written to.
    """
    folder = file.expanduser().parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"OUTPUT_FILE: got {str(file)!r}; {folder} is no folder that can be written to; make it so")


def write_results(file: Path, results: Mapping[str, Any], settings: Settings, warnings: Sequence[str]) -> None:
    """Write the results by run, with the settings, machine and warnings."""
    about = {
        "schema_version": SCHEMA_VERSION,
        "environment": {
            "machine": describe_machine(torch.device("cuda" if num_visible_gpus() else "cpu")),
            "num_threads": torch.get_num_threads(),
            "variables": {name.upper(): value for name, value in asdict(settings).items()},
        },
        "warnings": list(warnings),
    }
    write_json(file, {**results, **about})


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON."""
    file.write_text(json.dumps(content, indent=1) + "\n")
