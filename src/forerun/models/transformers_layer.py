"""Loads one decoder layer into transformers' own code, as a model that reads hidden states (for MTP heads)."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PretrainedConfig

from forerun.errors import ModelError, one_line
from forerun.models.packing import Packing
from forerun.models.transformers_attention import UnsupportedAttentionError
from forerun.models.transformers_logging import quiet_transformers
from forerun.models.transformers_model import EAGER, TransformersModel, mismatch, wrap_model

STAND_IN_TOKENS = 32
LISTS_BY_LAYER = ("layer_types", "mlp_layer_types")


def load_one_layer(
    like: TransformersModel, weights: Mapping[str, Tensor], packing: Packing | None
) -> TransformersModel:
    """Load a model of one layer like another model's last, for `TransformersModel.run_layers`.

    transformers converts the weights as it converts a whole checkpoint's (it stacks experts, for one).
    Embedding, final norm and head are random: `wrap_model` needs them to check the layer's attention.

    Args:
        like: the other model.
        weights: the layer's, "layers.0.self_attn.o_proj.weight" and so on, as checkpoints store them.
        packing: packs the linear layers for the native kernels, or None for torch.

    Raises:
        ModelError: a tensor is missing, surplus or of another shape.
    """
    config = _one_layer_config(like.wrapped.config.get_text_config())
    state = {f"model.{name}": weight for name, weight in weights.items()} | _stand_ins(config.hidden_size)
    try:
        with quiet_transformers():
            model, info = type(like.wrapped).from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=like.dtype,
                attn_implementation=EAGER,
                output_loading_info=True,
            )
    except Exception as error:
        raise ModelError(f"transformers cannot load it ({one_line(error)}); download the model again") from error
    wrong = mismatch(model, info)
    if wrong is not None:
        raise ModelError(wrong)
    try:
        return wrap_model(model.to(like.device).eval().requires_grad_(False), packing)
    except UnsupportedAttentionError as error:
        raise ModelError(f"its attention cannot be replaced by forerun's: {error}; use another method") from error


def _one_layer_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the same model with its last layer only."""
    one = copy.deepcopy(config)
    content = config.to_dict()
    changes = {name: content[name][-1:] for name in LISTS_BY_LAYER if content.get(name)}
    if "first_k_dense_replace" in content:
        changes["first_k_dense_replace"] = 0  # the last layer has experts
    changes |= {"num_hidden_layers": 1, "vocab_size": STAND_IN_TOKENS, "tie_word_embeddings": False}
    for name, value in (changes | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))).items():
        setattr(one, name, value)
    return one


def _stand_ins(width: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(0)
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: torch.randn(STAND_IN_TOKENS, width, generator=source) for name in tables} | {
        "model.norm.weight": torch.ones(width)
    }
