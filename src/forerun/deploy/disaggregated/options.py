"""Options of `forerun serve` for a process that reads prompts."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ConfigError

DEFAULT_LOCAL_PREFILL = 128


@dataclass(frozen=True, kw_only=True)
class PrefillOptions:
    """Long prompts read by a process of their own, which hands their KV over.

    Raises:
        ConfigError: a value is out of range.
    """

    prefill_threads: int | None = None
    """Threads of a process that reads long prompts, on cores of its own; by default the server's own engine reads them."""
    max_local_prefill_length: int = DEFAULT_LOCAL_PREFILL
    """Prompt tokens, those in cached blocks left out, up to which the server's own engine reads a prompt all the same."""

    def __post_init__(self) -> None:
        if self.prefill_threads is not None and self.prefill_threads < 1:
            raise ConfigError(f"prefill_threads: got {self.prefill_threads}; must be 1 or more")
        if self.max_local_prefill_length < 0:
            raise ConfigError(f"max_local_prefill_length: got {self.max_local_prefill_length}; must be 0 or more")
        if self.prefill_threads is None and self.max_local_prefill_length != DEFAULT_LOCAL_PREFILL:
            raise ConfigError(
                f"max_local_prefill_length: got {self.max_local_prefill_length}, and no other process reads prompts; give "
                "--prefill-threads too, or leave it out"
            )
