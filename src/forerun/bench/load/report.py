"""The result of a load test as JSON: the keys of `vllm bench serve`, and some that vLLM lacks."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.bench.load.sender import rates
from forerun.core.cpu_name import describe_processor
from forerun.core.load_figures import Figures
from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.bench.load.measure import Load, Measurement
    from forerun.bench.load.sender import Run
    from forerun.bench.load.workload import Traffic

SCHEMA_VERSION = 1

RESERVED_KEYS = frozenset(
    (
        *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "schema_version"),
        *("request_rate", "burstiness", "max_concurrency"),
        *("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps", "rps_change_events"),
        *("duration", "completed", "failed", "unsent", "total_input_tokens", "total_output_tokens", "target_duration"),
        *("interrupted", "unfinished"),
        *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
        *("max_output_tokens_per_s", "max_concurrent_requests", "peak_output_token_throughput"),
        *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times"),
        *("generated_texts", "errors", "chunk_tokens", "chunk_tokens_from", "energy", "environment"),
    )
)
RESERVED_SUFFIX, RESERVED_PREFIX = "_ms", "spec_decode_"


def is_reserved(key: str) -> bool:
    """Whether a result has, or may have, a key of this name, so that metadata may not use it."""
    return key in RESERVED_KEYS or key.endswith(RESERVED_SUFFIX) or key.startswith(RESERVED_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run, its figures, and how to identify it."""

    load: Load
    measurement: Measurement
    figures: Figures
    tokenizer: str
    label: str | None
    metadata: Mapping[str, str]

    def to_json(self, *, detailed: bool) -> dict[str, Any]:
        """All figures, and if `detailed` the times, lengths, texts and errors of each request too."""
        load, found = self.load, self.measurement
        traffic = load.traffic
        return {
            "date": found.started.strftime("%Y%m%d-%H%M%S"),
            "endpoint_type": load.endpoint.backend,
            "backend": load.endpoint.backend,
            "label": self.label,
            "model_id": load.model_id,
            "tokenizer_id": self.tokenizer,
            "num_prompts": len(load.requests),
            **self.metadata,
            "request_rate": "inf" if math.isinf(traffic.request_rate) else traffic.request_rate,
            "burstiness": "inf" if math.isinf(traffic.burstiness) else traffic.burstiness,
            "max_concurrency": traffic.max_concurrency,
            **self._ramp(),
            **self.figures.to_json(),
            "unsent": found.run.num_unsent,
            "interrupted": found.run.is_interrupted,
            "unfinished": found.run.num_unfinished,
            "target_duration": traffic.duration,
            "chunk_tokens_from": self._chunk_tokens_source(),
            **({} if found.drafts is None else found.drafts.to_json()),
            **(self._details() if detailed else {}),
            "schema_version": SCHEMA_VERSION,
            "energy": found.energy.to_json(
                output_tokens=self.figures.total_output,
                total_tokens=self.figures.total_tokens,
                requests=self.figures.completed,
            ),
            "environment": self._environment(),
        }

    def _ramp(self) -> dict[str, Any]:
        traffic = self.load.traffic
        if traffic.ramp_up_strategy is None:
            return {}
        return {
            "ramp_up_strategy": traffic.ramp_up_strategy,
            "ramp_up_start_rps": traffic.ramp_up_start_rps,
            "ramp_up_end_rps": traffic.ramp_up_end_rps,
            "rps_change_events": _rate_events(traffic, self.measurement.run, self.measurement.started),
        }

    def _chunk_tokens_source(self) -> str | None:
        """Where the tokens of each chunk come from; see `Answer`."""
        sources = {answer.chunk_tokens_source for answer in self.measurement.run.answers if answer.error is None}
        return "mixed" if len(sources) > 1 else next(iter(sources), None)

    def _details(self) -> dict[str, Any]:
        """vLLM's arrays, one entry per request."""
        answers = self.measurement.run.answers
        return {
            "input_lens": [answer.num_prompt_tokens for answer in answers],
            "output_lens": [0 if answer.error else answer.num_output_tokens for answer in answers],
            "ttfts": [answer.ttft for answer in answers],
            "itls": [answer.itls for answer in answers],
            "latencies": [answer.latency for answer in answers],
            "start_times": [answer.started for answer in answers],
            "queue_times": [answer.queue_time for answer in answers],
            "generated_texts": [answer.text for answer in answers],
            "errors": [answer.error or "" for answer in answers],
            "chunk_tokens": [[tokens for _, tokens in answer.weighted_chunks] for answer in answers],
        }

    def _environment(self) -> dict[str, Any]:
        """The client's machine and packages, and the server's address and version."""
        return {
            "client": {
                "processor": describe_processor(),
                "cores": os.cpu_count(),
                "platform": platform.platform(),
                "python": platform.python_version(),
                **{package: version(package) for package in ("forerun", "aiohttp")},
                "cpu_seconds": self.measurement.client_cpu_seconds,
            },
            "server": {"base_url": self.load.base_url, "version": self.measurement.server_version},
        }

    @property
    def file_name(self) -> str:
        """vLLM's name for a result file."""
        traffic = self.load.traffic
        if traffic.ramp_up_strategy is not None:
            start, end = traffic.ramp_up_start_rps, traffic.ramp_up_end_rps
            rate = f"ramp-up-{traffic.ramp_up_strategy}-{start:g}qps-{end:g}qps"
        else:
            rate = f"{traffic.request_rate}qps"
        places = "" if traffic.max_concurrency is None else f"-concurrency{traffic.max_concurrency}"
        label = self.label or self.load.endpoint.backend
        model = self.load.model_id.rstrip("/").split("/")[-1]
        return f"{label}-{rate}{places}-{model}-{self.measurement.started.strftime('%Y%m%d-%H%M%S')}.json"


def save(figures: Mapping[str, Any], path: Path, *, append: bool) -> None:
    """Write figures as one line of JSON, with `append` after the lines of earlier runs.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(("\n" if append and file.tell() else "") + json.dumps(figures))
    except OSError as error:
        raise ConfigError(f"result_filename: cannot write {path} ({error}); give another file") from error


def _rate_events(traffic: Traffic, run: Run, started: datetime) -> list[dict[str, Any]]:
    """When a rising rate reached each whole number of requests per second, in vLLM's format."""
    if traffic.ramp_up_start_rps is None or not run.answers:
        return []
    first = run.answers[0].started
    reached = int(traffic.ramp_up_start_rps)
    events = [{"rps": reached, "timestamp": started.isoformat()}]
    all_rates = rates(traffic, run.num_requests).tolist()
    for number, answer in zip(run.numbers, run.answers, strict=True):
        rate = int(all_rates[number])
        moment = started + timedelta(seconds=answer.started - answer.queue_time - first)
        events += [{"rps": rps, "timestamp": moment.isoformat()} for rps in range(reached + 1, rate + 1)]
        reached = max(reached, rate)
    return events
