"""The file that `forerun serve --config` reads, with the reasons for it as comments."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from forerun.plan.tuning.candidates import Candidate


def serve_options(model: str, candidate: Candidate, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `forerun serve` that run a configuration.

    Args:
        model: as the user named it.
        candidate: the configuration.
        engine: the user's other engine options by field of `EngineSettings`; those that are None are left out.
    """
    config = candidate.speculative_config
    drafting: dict[str, Any] = {"no-speculation": True} if config is None else {"speculative-config": dict(config)}
    options = {
        "model": model,
        **drafting,
        "max-num-seqs": candidate.limits.max_num_seqs,
        "max-num-batched-tokens": candidate.limits.max_num_batched_tokens,
        "quantization": candidate.quantization,
    }
    others = {name.replace("_", "-"): value for name, value in engine.items()}
    return {name: value for name, value in (options | others | options).items() if value is not None}


def serve_config(options: Mapping[str, Any], reasons: Sequence[str]) -> str:
    """The text of the file, YAML: the reasons, then one option a line."""
    comments = [f"# {line}" if line else "#" for reason in reasons for line in reason.splitlines() or [""]]
    plain: dict[str, Any] = json.loads(json.dumps(options))
    return "\n".join([*comments, *(f"{name}: {_on_one_line(value)}" for name, value in plain.items())]) + "\n"


def _on_one_line(value: Any) -> str:
    """A value as YAML; as JSON, 1e-05 would be read as a text."""
    listed: str = yaml.safe_dump([value], default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf)
    return listed.strip()[1:-1]
