"""The options of `forerun bench serve` beside those of the load, with the names of `vllm bench serve`."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cyclopts import Group, Parameter

from forerun.bench.energy import POWERCAP
from forerun.bench.load.answer import GOODPUT_METRICS, METRICS
from forerun.bench.load.workload import Backend
from forerun.cli.options import Flag, Words, check_picture
from forerun.core.writable import check_writable_file, check_writable_folder
from forerun.errors import ConfigError, did_you_mean

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
LOOPBACK = ("localhost", "::1", "0.0.0.0", "::")


@Parameter(name="*", group=Group("Server", sort_key=1))
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The server to load, and how to reach it."""

    backend: Backend = "openai"
    """openai: completions; openai-chat: chat completions."""
    base_url: str | None = None
    """The server's address, if it is not http://HOST:PORT."""
    host: str = DEFAULT_HOST
    """The server's host."""
    port: int = DEFAULT_PORT
    """The server's port."""
    endpoint: str | None = None
    """Path of the requests; by default /v1/completions or /v1/chat/completions."""
    model: str | None = None
    """The model; by default the first that the server lists."""
    served_model_name: str | None = None
    """The model's name in requests, if --model is not it."""
    tokenizer: str | None = None
    """A folder, a known name or a hub id with the tokenizer; by default the model's."""
    header: Words = None
    """Headers of each request, KEY=VALUE; OPENAI_API_KEY of the environment makes one."""
    request_id_prefix: str | None = None
    """What the ids of requests begin with; by default bench- and a random part."""
    ready_check_timeout_sec: float = 0.0
    """Seconds to wait for the server to be ready."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url: got {self.url!r}; must be a URL such as http://127.0.0.1:8000")
        if self.base_url is not None and (self.host, self.port) != (DEFAULT_HOST, DEFAULT_PORT):
            raise ConfigError(
                f"--base-url: got {self.base_url}, which has host and port; leave out --host and --port, or it"
            )
        if not 0 <= self.ready_check_timeout_sec < math.inf:
            raise ConfigError(f"--ready-check-timeout-sec: got {self.ready_check_timeout_sec:g}; must be 0 or more")
        ending = "/chat/completions" if self.backend == "openai-chat" else "/completions"
        if not self.path.endswith(ending) or (self.backend == "openai" and self.path.endswith("/chat/completions")):
            raise ConfigError(f"--endpoint: got {self.path}; must end in {ending} with --backend {self.backend}")
        _ = self.headers

    @property
    def path(self) -> str:
        """Path of the requests."""
        default = "/v1/chat/completions" if self.backend == "openai-chat" else "/v1/completions"
        return default if self.endpoint is None else self.endpoint

    @property
    def url(self) -> str:
        """The server's address."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}" if self.base_url is None else self.base_url.rstrip("/")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of each request.

        Raises:
            ConfigError: a header is not KEY=VALUE.
        """
        key = os.environ.get("OPENAI_API_KEY")
        return ({"Authorization": f"Bearer {key}"} if key else {}) | pairs("--header", self.header)

    @property
    def is_local(self) -> bool:
        """Whether the server's address is a loopback or unspecified one, so this machine."""
        host = urlsplit(self.url).hostname or ""
        return host in LOOPBACK or host.startswith("127.")

    @property
    def id_prefix(self) -> str:
        """The prefix of request ids."""
        return f"bench-{uuid.uuid4().hex[:8]}-" if self.request_id_prefix is None else self.request_id_prefix


@Parameter(name="*", group=Group("Sampling", sort_key=4))
@dataclass(frozen=True, kw_only=True)
class BodyOptions:
    """Sampling parameters of each request; those left out are the server's defaults."""

    temperature: float | None = None
    """0 always takes the most likely token."""
    top_p: float | None = None
    """Sample from the likeliest tokens that together have this probability."""
    top_k: int | None = None
    """Sample from this many of the likeliest tokens."""
    min_p: float | None = None
    """Drop tokens less likely than this share of the likeliest one's probability."""
    frequency_penalty: float | None = None
    """Lower the logit of a token by this much for each time it was written before."""
    presence_penalty: float | None = None
    """Lower the logits of tokens that were written before by this much."""
    repetition_penalty: float | None = None
    """Divide positive logits of tokens that appeared before by this."""
    logprobs: int | None = None
    """Log probabilities of so many tokens at each position."""
    ignore_eos: Flag = False
    """Write on after the model's end-of-text token; with random prompts this is always so."""
    extra_body: str | None = None
    """A JSON object with more keys; they replace those of other options."""

    def __post_init__(self) -> None:
        self._extra()

    def body(self, backend: Backend, *, ignore_eos: bool) -> dict[str, Any]:
        """The keys of a request's body that these options set."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        for name in ("extra_body", "ignore_eos", "logprobs"):
            given.pop(name, None)
        if self.logprobs is not None:
            chat = {"logprobs": True, "top_logprobs": self.logprobs}
            given |= chat if backend == "openai-chat" else {"logprobs": self.logprobs}
        if self.ignore_eos or ignore_eos:
            given["ignore_eos"] = True
        return given | self._extra()

    def _extra(self) -> dict[str, Any]:
        try:
            extra = {} if self.extra_body is None else json.loads(self.extra_body)
        except ValueError as error:
            raise ConfigError(f"--extra-body: not JSON ({error}); must be a JSON object") from None
        if not isinstance(extra, dict):
            raise ConfigError(f"--extra-body: got {self.extra_body}; must be a JSON object")
        return extra


@Parameter(name="*", group=Group("Figures", sort_key=5))
@dataclass(frozen=True, kw_only=True)
class FigureOptions:
    """The figures to report."""

    percentile_metrics: str = "ttft,tpot,itl,icl,e2el"
    """Latencies, with commas: ttft, tpot, itl, icl, e2el, client_queue_time, e2el_including_client_queue."""
    metric_percentiles: str = "99"
    """Percentiles, with commas."""
    goodput: Words = None
    """Goals in milliseconds, e.g. ttft:100 tpot:50 e2el:2000; counts requests that keep all of them."""
    energy_idle_seconds: float = 5.0
    """Where there is a sensor: seconds of rest before the run, for the energy net of it."""
    powercap_root: Path = POWERCAP
    """Where RAPL's counters lie, e.g. in a container's mount."""
    disable_tqdm: Flag = False
    """Show no progress bar."""

    def __post_init__(self) -> None:
        _ = self.metrics, self.percents, self.goals
        if not 0 <= self.energy_idle_seconds < math.inf:
            raise ConfigError(
                f"--energy-idle-seconds: got {self.energy_idle_seconds:g}; must be 0, for no figures net of it, or more"
            )

    @property
    def metrics(self) -> list[str]:
        """The names of the latencies to report.

        Raises:
            ConfigError: a name is unknown.
        """
        names = [name.strip() for name in self.percentile_metrics.split(",")]
        for name in names:
            if name not in METRICS:
                raise ConfigError(f"--percentile-metrics: got {name!r}{did_you_mean(name, METRICS)}")
        return list(dict.fromkeys(names))

    @property
    def percents(self) -> list[float]:
        """The percentiles to report.

        Raises:
            ConfigError: a percentile is no number from 0 to 100.
        """
        try:
            percents = [float(part) for part in self.metric_percentiles.split(",")]
        except ValueError:
            percents = [-1.0]
        if not all(0 <= percent <= 100 for percent in percents):
            raise ConfigError(
                f"--metric-percentiles: got {self.metric_percentiles!r}; must be numbers from 0 to 100 with commas "
                "between them, e.g. 50,90,99"
            )
        return percents

    @property
    def goals(self) -> dict[str, float]:
        """The goals of goodput: milliseconds by latency.

        Raises:
            ConfigError: a goal is not KEY:VALUE, or its key or value is wrong.
        """
        goals: dict[str, float] = {}
        for pair in self.goodput or ():
            name, _, text = pair.partition(":")
            if name in goals:
                raise ConfigError(f"--goodput: got {pair!r}, and {name} before; give it once")
            try:
                goals[name] = float(text)
            except ValueError:
                raise ConfigError(f"--goodput: got {pair!r}; must be NAME:MILLISECONDS, e.g. ttft:100") from None
            if name not in GOODPUT_METRICS or not goals[name] >= 0:
                raise ConfigError(
                    f"--goodput: got {pair!r}; must be {', '.join(GOODPUT_METRICS)}, with milliseconds from 0 up"
                )
        return goals


@Parameter(name="*", group=Group("Results", sort_key=6))
@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """The files to write the result to."""

    save_result: Flag = False
    """Write the result to a JSON file."""
    save_detailed: Flag = False
    """Write the times, lengths, text and error of each request too."""
    append_result: Flag = False
    """Add the result to the file as a further line."""
    result_dir: Path | None = None
    """The file's folder, made if it is not there; by default the current one."""
    result_filename: str | None = None
    """The file's name; by default LABEL-RATEqps-MODEL-TIME.json."""
    label: str | None = None
    """A name for the run; by default the backend's."""
    metadata: Words = None
    """KEY=VALUE pairs for the result."""
    plot: Path | None = None
    """Draw output, requests and latencies to this .png, .svg or .pdf file (needs the extra "bench")."""

    def __post_init__(self) -> None:
        check_picture("--plot", self.plot)
        for key in self.pairs:
            from forerun.bench.load.report import is_reserved  # numpy: only when it is needed

            if is_reserved(key):
                raise ConfigError(f"--metadata: got {key}, which the result has itself; give another name")
        if not self.saves:
            for field in fields(self):
                if field.name in ("save_detailed", "result_dir", "result_filename") and getattr(self, field.name):
                    option = f"--{field.name.replace('_', '-')}"
                    raise ConfigError(f"{option}: nothing is saved; give --save-result or --append-result too")
            return
        file = self.path("result.json")
        check_writable_folder("--result-dir", file.parent)
        if file.exists():
            check_writable_file("--result-filename", file)

    @property
    def saves(self) -> bool:
        """Whether the result is written to a file."""
        return self.save_result or self.append_result

    @property
    def pairs(self) -> dict[str, str]:
        """The metadata to add to the result.

        Raises:
            ConfigError: a pair is not KEY=VALUE.
        """
        return pairs("--metadata", self.metadata)

    def path(self, default: str) -> Path:
        """The file to write to, named `default` if no name was given."""
        return (self.result_dir or Path()) / (self.result_filename or default)


def pairs(option: str, given: Sequence[str] | None) -> dict[str, str]:
    """Parse KEY=VALUE words.

    Raises:
        ConfigError: a word is not KEY=VALUE.
    """
    found: dict[str, str] = {}
    for word in given or ():
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{option}: got {word!r}; must be KEY=VALUE")
        found[key.strip()] = value.strip()
    return found
