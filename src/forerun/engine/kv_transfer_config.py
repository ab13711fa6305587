"""`kv_transfer_config`, checked: where hidden states are saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, refuse_unknown_keys

REQUIRED = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
EXTRA = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """vLLM's `kv_connector_extra_config`, with its defaults.

    `use_synchronization_lock`: hold an exclusive lock (flock) on `<path>.lock` while the file at `path` is written.
    `allow_custom_save_path`: requests may name their file, anywhere that this process may write.

    Raises:
        ConfigError: a value is of a wrong type or out of range.
    """

    shared_storage_path: str | PathLike[str] = "/tmp"
    num_writer_threads: int = 8
    use_synchronization_lock: bool = True
    allow_custom_save_path: bool = False

    def __post_init__(self) -> None:
        path, num_threads = self.shared_storage_path, self.num_writer_threads
        if not isinstance(path, (str, PathLike)) or not str(path):
            raise ConfigError(f"shared_storage_path: got {path!r:.80}; must be a folder")
        if Path(path).exists() and not Path(path).is_dir():
            raise ConfigError(f"shared_storage_path: got {str(path)!r}, which is a file; must be a folder")
        if not isinstance(num_threads, int) or isinstance(num_threads, bool) or num_threads < 1:
            raise ConfigError(f"num_writer_threads: got {num_threads!r}; must be an integer of 1 or more")
        for name in ("use_synchronization_lock", "allow_custom_save_path"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: got {getattr(self, name)!r:.80}; must be True or False")


def resolve_kv_transfer(given: Mapping[str, Any]) -> Storage:
    """Resolve vLLM's dict, of which forerun knows the connector that saves hidden states.

    Raises:
        ConfigError: a key or value that does not exist, or is out of range.
    """
    _refuse_other_than_dict("kv_transfer_config", given)
    refuse_unknown_keys(given, (*REQUIRED, EXTRA), where="kv_transfer_config")
    for key, only in REQUIRED.items():
        if given.get(key) != only:
            raise ConfigError(f"{key}: got {given.get(key)!r:.80}; must be {only!r}")
    extra = given.get(EXTRA, {})
    _refuse_other_than_dict(EXTRA, extra)
    refuse_unknown_keys(extra, [f.name for f in fields(Storage)], where=EXTRA)
    return Storage(**extra)


def _refuse_other_than_dict(name: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}: got {given!r:.80}; must be a dict")
