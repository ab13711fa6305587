"""What transformers' configuration classes fill in where a config.json leaves it out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = dict[str, Any]
"""A configuration's fields by name, to be filled in place."""

LAYER_TYPES = ("full_attention", "sliding_attention")
SCALED_ROPES = ("linear", "llama3", "yarn")  # those of which a file must give the factor
ORIGINAL = "original_max_position_embeddings"  # tokens that a model was trained on before its rope was stretched


def same_window(fields: Fields) -> None:
    """Fill in nothing: all layers have the window that `sliding_window` names, or none has one."""


def optional_window(fields: Fields) -> None:
    """Leave the window of all layers out unless it is to be used."""
    if not fields["use_sliding_window"]:
        fields["sliding_window"] = None


def late_windows(fields: Fields) -> None:
    """Fill in Qwen's windows: none, or one in the layers from `max_window_layers` on."""
    optional_window(fields)
    first = fields["max_window_layers"] if fields["sliding_window"] is not None else fields["num_hidden_layers"]
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(fields["num_hidden_layers"])]
    set_if_none(fields, "layer_types", kinds)


def windows_without_rope(fields: Fields) -> None:
    """Fill in SmolLM3's windows: in the layers that have no rotary embedding, if in any."""
    has_windows = fields["use_sliding_window"] and fields["sliding_window"] is not None
    rotates = fields["no_rope_layers"]
    kinds = ["sliding_attention" if has_windows and not one else "full_attention" for one in rotates]
    set_if_none(fields, "layer_types", kinds)


def alternating_windows(fields: Fields, *, every: int = 2) -> None:
    """Fill in Gemma 2's windows: full attention in every second layer."""
    kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(fields["num_hidden_layers"])]
    set_if_none(fields, "layer_types", kinds)


def mostly_windows(fields: Fields) -> None:
    """Fill in Gemma 3's windows: full attention in every `sliding_window_pattern`-th layer."""
    alternating_windows(fields, every=fields["sliding_window_pattern"])


def set_if_none(fields: Fields, name: str, value: Any) -> None:
    """Set a field that is None."""
    if fields[name] is None:
        fields[name] = value


def one_rope(fields: Fields, theta: float) -> Fields | None:
    """Resolve the rope parameters of all layers, under their newer or older names; None if transformers has to read them."""
    parameters = copy.copy(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    if not isinstance(parameters, dict):
        return None
    parameters.setdefault("rope_theta", fields.get("rope_theta", theta))
    if fields.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", fields["partial_rotary_factor"])
    return _standardized(parameters, fields)


def rope_unless_long(fields: Fields, theta: float) -> Fields | None:
    """Resolve the rope as `one_rope` does, but leave LongRoPE to transformers."""
    parameters = one_rope(fields, theta)
    return None if parameters is None or parameters["rope_type"] == "longrope" else parameters


def rope_if_given(fields: Fields, theta: float) -> Fields | None:
    """Resolve the rope as `one_rope` does, but leave to transformers what a file without one has."""
    return one_rope(fields, theta) if fields.get("rope_scaling") or fields.get("rope_parameters") else None


def phi3_rope(fields: Fields, theta: float) -> Fields | None:
    """Resolve Phi-3's rope as `one_rope` does, but leave what is stretched in another way than LongRoPE to transformers."""
    parameters = one_rope(fields, theta)
    if parameters is None or fields.get("partial_rotary_factor", 1.0) is None:
        return None
    if parameters["rope_type"] not in ("default", "longrope"):
        return None
    return {"partial_rotary_factor": 1.0} | parameters


def two_ropes(fields: Fields, theta: float) -> Fields | None:
    """Resolve Gemma 3's ropes: one for layers with a window, another, which may be scaled, for the rest."""
    given = fields.get("rope_parameters") or {kind: {"rope_type": "default"} for kind in LAYER_TYPES}
    scaling = fields.get("rope_scaling") or {}
    if not isinstance(given, dict) or not all(isinstance(one, dict) for one in (scaling, *map(given.get, LAYER_TYPES))):
        return None
    full = given["full_attention"] | scaling
    full.setdefault("rope_theta", fields.get("rope_theta", theta))
    sliding = {"rope_theta": fields.get("rope_local_base_freq", 10_000.0)} | given["sliding_attention"]
    parameters = {"full_attention": _standardized(full, fields), "sliding_attention": _standardized(sliding, fields)}
    return None if None in parameters.values() else parameters


def _standardized(parameters: Fields, fields: Fields) -> Fields | None:
    """Complete rope parameters with a type and the length before scaling; None if transformers has to check them."""
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    rope_type = parameters["rope_type"]
    if any(isinstance(value, Mapping) for value in parameters.values()):
        return None
    if rope_type == "longrope":
        if not _has_longrope_factors(parameters, fields):
            return None
    elif rope_type != "default" and (rope_type not in SCALED_ROPES or "factor" not in parameters):
        return None
    if rope_type in ("llama3", "yarn", "longrope"):
        parameters.setdefault(ORIGINAL, fields["max_position_embeddings"])
    return parameters


def _has_longrope_factors(parameters: Fields, fields: Fields) -> bool:
    """Return whether both of LongRoPE's lists have a number for each frequency, as transformers demands."""
    part = parameters.get("partial_rotary_factor", 1.0)
    if type(part) not in (int, float) or not math.isfinite(part):
        return False
    num_frequencies = int(fields["hidden_size"] // fields["num_attention_heads"] * part) // 2
    return all(
        isinstance(factors, list)
        and len(factors) == num_frequencies
        and all(type(factor) in (int, float) for factor in factors)
        for factors in (parameters.get("short_factor"), parameters.get("long_factor"))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDefaults:
    """How transformers' configuration class of one model_type completes a file.

    Attributes:
        needed: fields that a file must have, besides those of every family.
        unusual: fields by which transformers takes a file for another class's.
        types: types of the fields that no other family has.
        values: fields that a file may leave out, and what they are then.
        fill_windows: fills in the attention type of each layer.
        rope: resolves the rope parameters, with `theta` where a file names none.
    """

    needed: tuple[str, ...] = ()
    unusual: tuple[str, ...] = ()
    types: Mapping[str, tuple[type, ...]] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    fill_windows: Callable[[Fields], None] = same_window
    rope: Callable[[Fields, float], Fields | None] = one_rope
    theta: float = 10_000.0
