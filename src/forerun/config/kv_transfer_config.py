"""`kv_transfer_config`, checked: where hidden states are saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from forerun.errors import ConfigError, refuse_unknown_keys
from forerun.executor.hidden_states import Storage

REQUIRED = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
EXTRA = "kv_connector_extra_config"


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
