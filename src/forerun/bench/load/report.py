"""The result of a load test as JSON: the keys of `vllm bench serve`, and ours."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forerun.bench.load.figures import Figures
from forerun.bench.load.measure import Load, Measurement, rate_events
from forerun.bench.processor import describe_processor
from forerun.errors import ConfigError

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A run, and what it came to."""

    load: Load
    measurement: Measurement
    figures: Figures
    tokenizer: str
    label: str | None
    metadata: Mapping[str, str]

    def to_json(self, *, detailed: bool) -> dict[str, Any]:
        """All figures; `detailed`: with the times, lengths, texts and errors of each request."""
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
            "target_duration": traffic.duration,
            "chunk_tokens_from": self._weights(),
            **({} if found.drafts is None else found.drafts.to_json()),
            **(self._details() if detailed else {}),
            "schema_version": SCHEMA_VERSION,
            "energy": found.energy.to_json(
                output_tokens=self.figures.total_output,
                total_tokens=self.figures.total_input + self.figures.total_output,
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
            "rps_change_events": rate_events(traffic, self.measurement.run, self.measurement.started),
        }

    def _weights(self) -> str | None:
        """Where the tokens of each chunk are known from: the server's word, or an even spread."""
        said = {answer.counts_chunk_tokens for answer in self.measurement.run.answers if answer.error is None}
        if len(said) == 2:
            return "mixed"
        return None if not said else "usage" if said.pop() else "even"

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
        """What took the measurement, and what was measured, as far as it says."""
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
    """Write figures as one line of JSON, after those of earlier runs where `append` says so.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(("\n" if append and file.tell() else "") + json.dumps(figures))
    except OSError as error:
        raise ConfigError(f"result_filename: cannot write {path} ({error}); give another file") from error
