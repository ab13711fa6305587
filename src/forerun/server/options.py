"""What `forerun serve` takes besides the engine's own options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from forerun.core.writable import check_writable_file
from forerun.errors import ConfigError

SpecMetrics = Literal["none", "summary", "detailed"]
ToolCallParser = Literal["hermes", "llama3_json", "mistral", "openai"]
ReasoningParser = Literal["qwen3", "deepseek_r1", "mistral", "openai_gptoss", "none"]


def _whole(_hint: Any, value: str, **_: Any) -> list[str]:
    """A variable of the environment as one value, with its spaces."""
    return [value]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where the server listens, whom it answers and what its answers carry.

    Raises:
        ConfigError: a value is out of range.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every interface of this machine."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: Annotated[tuple[str, ...], Parameter(env_var_split=_whole)] = ()
    """Key that requests must bear; may be given several times. Better in the environment: FORERUN_API_KEY."""
    served_model_name: str | None = None
    """Name of the model in requests and answers; by default MODEL as it is given."""
    max_queue: int = 1024
    """Completions that may wait for a place among --max-num-seqs; beyond these the answer is 429."""
    max_connections: int = 4096
    """Connections open at once; beyond these the one is closed that has kept the server waiting longest."""
    client_timeout: int = 60
    """Seconds that a client may take to send a request, or to take in more of an answer."""
    per_request_spec_decode_metrics: SpecMetrics = "summary"
    """How much answers report about their drafts: none, summary or detailed (each step)."""
    tool_call_parser: ToolCallParser | None = None
    """Form in which the model writes tool calls: hermes, llama3_json, mistral or openai; by default what its template shows."""
    reasoning_parser: ReasoningParser | None = None
    """Form in which the model writes its reasoning: qwen3 and deepseek_r1 (<think>), mistral ([THINK]), openai_gptoss, or none
    to leave it in the content; by default what its template shows."""
    enable_tokenizer_info_endpoint: bool = False
    """Serve /tokenizer_info, which shows the chat template."""
    shutdown_timeout: int = 30
    """Seconds that running requests get to finish after SIGTERM or Ctrl-C."""
    step_timeout: int = 300
    """Seconds that one step of the engine may take; /health answers 503 while one takes longer."""
    watch_head: Path | None = None
    """Folder of forerun train: the head in it drafts as soon as it is there, and again when it changes, without a restart."""
    request_log: Path | None = None
    """File to which a line is appended for each completion when it ends, for "forerun simulate --trace": when its request
    arrived, how many tokens it had, which prompts begin alike; no text. By default nothing is logged."""
    disable_log_stats: bool = False
    """Write no line on throughput and acceptance every ten seconds."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port: got {self.port}; must be from 0 (a free one) to {2**16 - 1}")
        if self.max_queue < 0:
            raise ConfigError(f"max_queue: got {self.max_queue}; must be 0 or more")
        if self.max_connections < 1:
            raise ConfigError(f"max_connections: got {self.max_connections}; must be 1 or more")
        if self.client_timeout <= 0:
            raise ConfigError(f"client_timeout: got {self.client_timeout}; must be 1 second or more")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout: got {self.shutdown_timeout}; must be 0 seconds or more")
        if self.step_timeout < 1:
            raise ConfigError(f"step_timeout: got {self.step_timeout}; must be 1 second or more")
        if self.request_log is not None and self.request_log.suffix != ".jsonl":
            raise ConfigError(f"request_log: got {self.request_log}; must end in .jsonl")
        check_writable_file("request_log", self.request_log)
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError("served_model_name: got an empty one; give a name, or leave it out for that of MODEL")
        self._check_keys()

    def _check_keys(self) -> None:
        if any(not key.strip() for key in self.api_key):
            raise ConfigError("api_key: got an empty one; give a key, or leave it out to serve without keys")
        if any(key != key.strip() for key in self.api_key):  # as a file's last line end is
            raise ConfigError(
                "api_key: got one that begins or ends with white space, which headers drop, so that no request could bear it; "
                "leave it out there"
            )
        if any(not (key.isascii() and key.isprintable()) for key in self.api_key):
            raise ConfigError(
                "api_key: got one with other characters than printable ASCII, which clients cannot put into a header; "
                "give another key"
            )
