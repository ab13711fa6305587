"""Completes a model's configuration as transformers would, without it: importing it takes 100 MB and seconds.

A family's row names what transformers' class fills in where a file leaves it out; a file that leaves out more, or
holds anything unusual, is left to transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from forerun.errors import ModelError
from forerun.models.config import SIZES
from forerun.models.config_defaults import LAYER_TYPES, ConfigDefaults, Fields, set_if_none
from forerun.models.families import MODEL_TYPES, Family, decoder_config

NEEDED = (*SIZES, "rms_norm_eps", "eos_token_id")
UNUSUAL = ("text_config", "decoder", "generator", "text_encoder", "per_layer_config", "mlp_layer_types")
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(SIZES, (int,)),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "max_window_layers", "query_pre_attn_scalar"), (int,)),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), (bool,)),
    **dict.fromkeys(("hidden_act", "hidden_activation"), (str,)),
    "layer_types": (list,),
    "final_logit_softcapping": (float, type(None)),
    "use_bidirectional_attention": (bool, type(None)),
    "rms_norm_eps": (float,),
    "sliding_window": (int, type(None)),
    "eos_token_id": (int, list, type(None)),
}
"""The types that transformers takes for fields of several families; it has to refuse others."""


class ConfigStandIn(SimpleNamespace):
    """Stands in for transformers' configuration: its fields, and those of its methods that forerun calls."""

    def to_dict(self) -> Fields:
        """Return all fields by name."""
        return dict(vars(self))

    def get_text_config(self) -> ConfigStandIn:
        """Return the part that is about text: all of it."""
        return self


def config_without_transformers(content: Mapping[str, Any]) -> ConfigStandIn | None:
    """Complete a config.json as transformers would, or return None if transformers has to read it."""
    family = MODEL_TYPES.get(content.get("model_type", ""))
    if family is None or family.config is None or content.get("is_encoder_decoder"):
        return None
    defaults = family.config
    if any(name in content for name in (*UNUSUAL, *defaults.unusual)):
        return None
    if (content.get("architectures") or [family.architecture]) != [family.architecture]:
        return None
    fields = {**defaults.values, **content}
    if not all(name in fields for name in (*NEEDED, *defaults.needed)) or not _have_their_types(fields, defaults):
        return None
    try:
        config = completed(content, family)
        return config if _is_ordinary(config) and decoder_config(config) else None
    except (ModelError, ArithmeticError, TypeError):  # transformers reports what is wrong
        return None


def completed(content: Mapping[str, Any], family: Family) -> ConfigStandIn:
    """Fill in what a configuration leaves out, as transformers would; the family's row must say how."""
    assert family.config is not None, "transformers has to read this family's configuration"
    fields = {**family.config.values, **content, "architectures": [family.architecture]}
    _fill(fields, family.config)
    return ConfigStandIn(**fields)


def _have_their_types(fields: Fields, defaults: ConfigDefaults) -> bool:
    """Return whether all values have types that transformers takes; None is taken where it is the default."""
    types = {**TYPES, **defaults.types}
    return all(
        type(value) in types.get(name, (type(value),)) or (value is None and defaults.values.get(name, ...) is None)
        for name, value in fields.items()
    )


def _fill(fields: Fields, defaults: ConfigDefaults) -> None:
    """Fill in the fields that depend on others."""
    set_if_none(fields, "num_key_value_heads", fields["num_attention_heads"])
    if "head_dim" in defaults.values:
        set_if_none(fields, "head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    fields["dtype"] = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    defaults.fill_windows(fields)
    fields["rope_parameters"] = defaults.rope(fields, defaults.theta)


def _is_ordinary(config: ConfigStandIn) -> bool:
    """Return whether transformers would accept a completed configuration."""
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
