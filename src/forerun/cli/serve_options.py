"""Options of `forerun bench serve` about the server and its requests, by the names of `vllm bench serve`."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

from cyclopts import Group, Parameter

from forerun.bench.load.endpoint import Backend
from forerun.errors import ConfigError

Words = Annotated[list[str] | None, Parameter(consume_multiple=True, negative=())]
Flag = Annotated[bool, Parameter(negative=())]

LOOPBACK = ("localhost", "::1", "0.0.0.0", "::")


@Parameter(name="*", group=Group("Server", sort_key=1))
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Which server, and how it is spoken to."""

    backend: Backend = "openai"
    """openai: completions; openai-chat: chat completions."""
    base_url: str | None = None
    """The server's address, if it is not http://HOST:PORT."""
    host: str = "127.0.0.1"
    """The server's host."""
    port: int = 8000
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
            ConfigError: one is not KEY=VALUE.
        """
        key = os.environ.get("OPENAI_API_KEY")
        return ({"Authorization": f"Bearer {key}"} if key else {}) | pairs("--header", self.header)

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine, as far as its address tells."""
        host = urlsplit(self.url).hostname or ""
        return host in LOOPBACK or host.startswith("127.")

    @property
    def id_prefix(self) -> str:
        """What the ids of requests begin with."""
        return f"bench-{uuid.uuid4().hex[:8]}-" if self.request_id_prefix is None else self.request_id_prefix


@Parameter(name="*", group=Group("Sampling", sort_key=4))
@dataclass(frozen=True, kw_only=True)
class BodyOptions:
    """What each request asks for; what is not given is left to the server."""

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
        """The keys of a request that these options set."""
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


def pairs(option: str, given: Sequence[str] | None) -> dict[str, str]:
    """KEY=VALUE words as a dict.

    Raises:
        ConfigError: one is not that.
    """
    found: dict[str, str] = {}
    for word in given or ():
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{option}: got {word!r}; must be KEY=VALUE")
        found[key.strip()] = value.strip()
    return found
