"""Reads config.json of architectures with a table row as transformers would, without its 100 MB.

A row says what transformers' class fills in where a file leaves it out. A file that leaves out more, or
holds anything out of the ordinary, is not for this module: it gives None, and transformers reads the file.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from forerun.errors import ModelError
from forerun.models.families import decoder_config

INT, FLOAT, BOOL = (int,), (float,), (bool,)
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), INT),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"), INT),
    **dict.fromkeys(("max_window_layers", "query_pre_attn_scalar", "sliding_window_pattern"), INT),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier"), (int, float)),
    **dict.fromkeys(("residual_multiplier", "logits_scaling"), (int, float)),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), BOOL),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (float, type(None))),
    **dict.fromkeys(("hidden_act", "hidden_activation"), (str,)),
    **dict.fromkeys(("layer_types", "no_rope_layers"), (list,)),
    "use_bidirectional_attention": (bool, type(None)),
    "rms_norm_eps": FLOAT,
    "sliding_window": (int, type(None)),
    "eos_token_id": (int, list, type(None)),
}
"""The types that transformers takes for a field; others are for it to refuse."""

NEEDED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "rms_norm_eps", "eos_token_id"),
)
LAYER_TYPES = ("full_attention", "sliding_attention")
SCALED_ROPES = ("linear", "llama3", "yarn")
UNUSUAL = ("text_config", "decoder", "generator", "text_encoder", "per_layer_config", "mlp_layer_types")

Fields = dict[str, Any]


class PlainConfig(SimpleNamespace):
    """A configuration with the fields, and as far as we use it the interface, of transformers' own."""

    def to_dict(self) -> Fields:
        """Field -> value."""
        return dict(vars(self))

    def get_text_config(self) -> PlainConfig:
        """The part that is about text: all of it."""
        return self


def _one_window(fields: Fields) -> None:
    """Windows are the same in all layers."""


def _late_windows(fields: Fields) -> None:
    """Qwen's: none, or one in the layers from `max_window_layers` on."""
    if not fields["use_sliding_window"]:
        fields["sliding_window"] = None
    first = fields["max_window_layers"] if fields["sliding_window"] is not None else fields["num_hidden_layers"]
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(fields["num_hidden_layers"])]
    _set_where_open(fields, "layer_types", kinds)


def _windows_with_rope(fields: Fields) -> None:
    """SmolLM3's: a window in layers that know no positions, if at all."""
    has_windows = fields["use_sliding_window"] and fields["sliding_window"] is not None
    rotates = fields["no_rope_layers"]
    kinds = ["sliding_attention" if has_windows and not one else "full_attention" for one in rotates]
    _set_where_open(fields, "layer_types", kinds)


def _alternating_windows(fields: Fields, *, every: int = 2) -> None:
    """Gemma 2's: full attention in every second layer."""
    kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(fields["num_hidden_layers"])]
    _set_where_open(fields, "layer_types", kinds)


def _mostly_windows(fields: Fields) -> None:
    """Gemma 3's: full attention in every n-th layer."""
    _alternating_windows(fields, every=fields["sliding_window_pattern"])


def _set_where_open(fields: Fields, name: str, value: Any) -> None:
    if fields[name] is None:
        fields[name] = value


def _one_rope(fields: Fields, theta: float) -> Fields | None:
    """One set of parameters, under its newer or older names."""
    parameters = copy.copy(fields.get("rope_scaling") or fields.get("rope_parameters") or {})
    if not isinstance(parameters, dict):
        return None
    parameters.setdefault("rope_theta", fields.get("rope_theta", theta))
    if fields.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", fields["partial_rotary_factor"])
    return _standardized(parameters, fields)


def _default_rope(fields: Fields, theta: float) -> Fields | None:
    """Phi-3's, whose scaled ropes are for transformers."""
    parameters = _one_rope(fields, theta)
    if parameters is None or parameters["rope_type"] != "default" or fields.get("partial_rotary_factor", 1.0) is None:
        return None
    return {"partial_rotary_factor": 1.0} | parameters


def _two_ropes(fields: Fields, theta: float) -> Fields | None:
    """Gemma 3's: one for layers with a window, one that may be scaled for the others."""
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
    """With a type, and the length before scaling; None: there is something about it for transformers to say."""
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    rope_type = parameters["rope_type"]
    if any(isinstance(value, Mapping) for value in parameters.values()):
        return None
    if rope_type != "default" and (rope_type not in SCALED_ROPES or "factor" not in parameters):
        return None
    if rope_type in ("llama3", "yarn"):
        parameters.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    return parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What transformers' class of one model_type fills in.

    `defaults` are the fields that files may leave out; `needed` those that they may not, besides `NEEDED`;
    `unusual` those by which transformers takes a file for another class's, besides `UNUSUAL`.
    """

    architecture: str
    needed: tuple[str, ...] = ()
    unusual: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fill_windows: Callable[[Fields], None] = _one_window
    rope: Callable[[Fields, float], Fields | None] = _one_rope
    theta: float = 10_000.0


GATED = {"hidden_act": "silu", "tie_word_embeddings": False}
ALL_HEADS = {"num_key_value_heads": None}  # as many as there are queries
OWN_HEADS = {"head_dim": None}  # the hidden size's share
BY_LAYER = {"layer_types": None}
QWEN_WINDOWS = ("num_key_value_heads", "use_sliding_window", "sliding_window", "max_window_layers")
GEMMA_NEEDED = ("num_key_value_heads", "head_dim", "sliding_window", "query_pre_attn_scalar", "hidden_activation")
GEMMA = BY_LAYER | {"tie_word_embeddings": True, "attention_bias": False}

ROWS: dict[str, Row] = {
    "llama": Row(
        architecture="LlamaForCausalLM",
        defaults=GATED | ALL_HEADS | OWN_HEADS | {"attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Row(
        architecture="MistralForCausalLM",
        needed=("num_key_value_heads", "sliding_window"),
        unusual=("layer_types",),
        defaults=GATED | OWN_HEADS,
    ),
    "qwen2": Row(
        architecture="Qwen2ForCausalLM", needed=QWEN_WINDOWS, defaults=GATED | BY_LAYER, fill_windows=_late_windows
    ),
    "qwen3": Row(
        architecture="Qwen3ForCausalLM",
        needed=(*QWEN_WINDOWS, "head_dim"),
        defaults=GATED | BY_LAYER | {"attention_bias": False},
        fill_windows=_late_windows,
    ),
    "smollm3": Row(
        architecture="SmolLM3ForCausalLM",
        needed=("num_key_value_heads", "use_sliding_window", "sliding_window", "no_rope_layers"),
        defaults=GATED | BY_LAYER | {"tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False},
        fill_windows=_windows_with_rope,
        theta=2_000_000.0,
    ),
    "gemma2": Row(
        architecture="Gemma2ForCausalLM",
        needed=(*GEMMA_NEEDED, "attn_logit_softcapping", "final_logit_softcapping"),
        defaults=GEMMA | {"use_bidirectional_attention": None},
        fill_windows=_alternating_windows,
    ),
    "gemma3_text": Row(
        architecture="Gemma3ForCausalLM",
        needed=GEMMA_NEEDED,
        defaults=GEMMA
        | {"use_bidirectional_attention": False, "final_logit_softcapping": None, "sliding_window_pattern": 6},
        fill_windows=_mostly_windows,
        rope=_two_ropes,
        theta=1_000_000.0,
    ),
    "phi3": Row(
        architecture="Phi3ForCausalLM",
        needed=("sliding_window",),
        defaults=GATED | ALL_HEADS,
        rope=_default_rope,
    ),
    "olmo2": Row(architecture="Olmo2ForCausalLM", defaults=GATED | ALL_HEADS | {"attention_bias": False}),
    "granite": Row(
        architecture="GraniteForCausalLM",
        needed=("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
        defaults=GATED | ALL_HEADS | {"attention_bias": False, "mlp_bias": False},
    ),
}
"""model_type -> its row; transformers reads models with parts besides the text's, as Gemma 3's larger ones are."""


def plain_config(content: Mapping[str, Any]) -> PlainConfig | None:
    """The configuration in a config.json that the decoder computes; None: transformers has to read it."""
    row = ROWS.get(content.get("model_type", ""))
    if row is None or content.get("is_encoder_decoder") or any(name in content for name in (*UNUSUAL, *row.unusual)):
        return None
    if (content.get("architectures") or [row.architecture]) != [row.architecture]:
        return None
    fields = {**row.defaults, **content, "architectures": [row.architecture]}
    if not all(name in fields for name in (*NEEDED, *row.needed)) or not _are_of_their_kinds(fields, row):
        return None
    try:
        _fill(fields, row)
        config = PlainConfig(**fields)
        return config if _is_ordinary(config) and decoder_config(config) else None
    except (ModelError, ArithmeticError, TypeError):  # transformers says what is wrong
        return None


def _are_of_their_kinds(fields: Fields, row: Row) -> bool:
    """Whether all values have the types that transformers takes; None is one where it means to fill the field in."""
    return all(
        type(value) in KINDS.get(name, (type(value),)) or (value is None and row.defaults.get(name, ...) is None)
        for name, value in fields.items()
    )


def _fill(fields: Fields, row: Row) -> None:
    """Fill in what depends on other fields."""
    _set_where_open(fields, "num_key_value_heads", fields["num_attention_heads"])
    if "head_dim" in row.defaults:
        _set_where_open(fields, "head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    fields["dtype"] = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    row.fill_windows(fields)
    fields["rope_parameters"] = row.rope(fields, row.theta)


def _is_ordinary(config: PlainConfig) -> bool:
    """Whether transformers has nothing to say against a filled configuration."""
    kinds, eos = getattr(config, "layer_types", None), config.eos_token_id
    return (
        config.num_attention_heads > 0
        and config.hidden_size % config.num_attention_heads == 0
        and getattr(config, "head_dim", 2) % 2 == 0
        and config.rope_parameters is not None
        and (config.dtype is None or isinstance(config.dtype, torch.dtype))
        and (kinds is None or (len(kinds) == config.num_hidden_layers and all(kind in LAYER_TYPES for kind in kinds)))
        and all(type(token_id) is int for token_id in (eos if isinstance(eos, list) else ()))
    )
