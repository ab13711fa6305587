"""Reads what `forerun bench serve` and `vllm bench serve` save of a load test with --save-detailed, or `forerun simulate`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from forerun.errors import ConfigError


class LoadTestFile(NamedTuple):
    """A load test as it was saved, whose requests were all answered."""

    content: Mapping[str, Any]
    requests: list[tuple[Any, ...]]  # what the arrays that were asked for have of each, which may be anything


def read_load_test_file(path: Path, *needed: str, **defaults: Any) -> LoadTestFile:
    """Read a load test, and of each request what some arrays have of it.

    Args:
        path: the file.
        needed: the arrays.
        defaults: further arrays, and what a request has where the file lacks one.

    Raises:
        ConfigError: the file cannot be read, lacks an array, or has failed or unfinished requests.
    """
    found = _json_of(path)
    missing = [key for key in needed if not isinstance(found, dict) or not isinstance(found.get(key), list)]
    if missing:
        raise ConfigError(f"{path}: has no {', '.join(missing)}; save a load test with --save-detailed")
    if found.get("unfinished"):
        raise ConfigError(
            f"{path}: was interrupted with requests under way, whose lengths are not known; give a load test that ended"
        )
    num_requests = len(found[needed[0]])
    optional = {key: found.get(key) or [default] * num_requests for key, default in (defaults | {"errors": ""}).items()}
    for key, array in optional.items():
        if not isinstance(array, list):
            raise ConfigError(f"{path}: got {key}={array!r:.60}; must be a list: save the load test again")
    arrays = {key: found[key] for key in needed} | optional
    if len(set(map(len, arrays.values()))) != 1:
        counts = ", ".join(f"{len(array)} {name}" for name, array in arrays.items())
        raise ConfigError(f"{path}: has {counts}; must be as many of each: save the load test again")
    for number, failure in enumerate(arrays.pop("errors")):
        if failure:
            raise ConfigError(
                f"{path}, request {number} (from 0): failed ({failure!r:.60}), so that its length is not known; give a load "
                "test without failures"
            )
    return LoadTestFile(found, list(zip(*arrays.values(), strict=True)))


def _json_of(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or 'unreadable'}; give the result of a load test") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); give the result of one load test") from None
    if isinstance(found, list):
        raise ConfigError(
            f"{path}: is a list, as ShareGPT's files; these have no times: give the result of a load test, or let forerun "
            "simulate draw times for them, see --conversations"
        )
    return found
