"""An EAGLE-3 head that begins as a copy of one of the target's blocks, over a part of its vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.models.base import LoadedTarget
from forerun.models.checkpoint import Checkpoint, open_checkpoint
from forerun.models.config import DecoderConfig
from forerun.models.heads.eagle3 import DRAFTS_BOTH, MASK
from forerun.train.initial_weights import feature_layers, has_llama_parts, llama_config, reduced_head

FINAL_NORM = "model.norm.weight"

OF_EMBEDDINGS = 0.02  # deviation of the weights that read the token's embedding, which the block has no part for


def check_block(target: LoadedTarget) -> DecoderConfig:
    """Check that a head can begin from the target's last block, and return how the target is made.

    Raises:
        ConfigError: the target's blocks differ from Llama's, or its files do not hold its tensors.
    """
    model = target.model
    if not has_llama_parts(model):
        raise ConfigError(
            "model: forerun train begins from blocks like Llama's, this model has others; train_head can begin anew"
        )
    if target.path is None:
        raise ConfigError("model: was made in memory; forerun train reads a block of it from its files")
    checkpoint = open_checkpoint(target.path)
    query = f"{_prefix(target)}self_attn.q_proj.weight"
    if not {query, FINAL_NORM} <= checkpoint.names():
        raise ConfigError(f"model: has no tensors {query} and so on; give one with Llama's names")
    _load(checkpoint, query)
    return model.config


def begin_from_block(target: LoadedTarget, draft_ids: Tensor, *, seed: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Begin a head whose layer is a copy of the target's last block, reading the hidden state near the end.

    Args:
        target: a loaded decoder with blocks like Llama's.
        draft_ids: the tokens that the head can draft, [V] int64 ascending.
        seed: of the weights that have nothing to be copied from.

    Returns:
        The content of config.json and the tensors, fp32 in the CPU's memory, in the authors' layout.

    Raises:
        ConfigError: the target's blocks differ from Llama's, or its files do not hold its tensors.
    """
    config, model = check_block(target), target.model
    layer_ids = feature_layers(model.num_layers)
    source = torch.Generator().manual_seed(seed)
    block = _read_block(target)
    final_norm = block.pop(FINAL_NORM)
    width, num_features = model.hidden_size, len(layer_ids)
    tensors = {f"midlayer.{name}": tensor for name, tensor in block.items() if name != "input_layernorm.weight"}
    for name in ("q_proj", "k_proj", "v_proj"):
        copied = block[f"self_attn.{name}.weight"]
        of_embeddings = OF_EMBEDDINGS * torch.randn(copied.shape, generator=source)
        tensors[f"midlayer.self_attn.{name}.weight"] = torch.cat([of_embeddings, copied], dim=1)
    tensors["midlayer.hidden_norm.weight"] = block["input_layernorm.weight"]
    tensors["midlayer.input_layernorm.weight"] = torch.ones(width)
    fusion = OF_EMBEDDINGS / num_features * torch.randn(width, num_features * width, generator=source)
    fusion[:, -width:] += torch.eye(width)
    tensors["fc.weight"] = fusion
    tensors["norm.weight"] = final_norm
    tensors |= reduced_head(model, draft_ids)
    tensors[MASK] = torch.zeros(1, 1, num_features * width)
    content = {
        **llama_config(model),
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": _rope_theta(config),
        "draft_vocab_size": len(draft_ids),
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "mask_token_id": model.vocab_size - 1,
        DRAFTS_BOTH: True,
    }
    return content, tensors


def _rope_theta(config: DecoderConfig) -> float:
    rope = config.ropes[0]
    return 10000.0 if rope is None else float(rope.theta)


def _read_block(target: LoadedTarget) -> dict[str, Tensor]:
    """Read the tensors of the last block from the target's files, in fp32, named as within the block, and the final norm."""
    assert target.path is not None, "the target was checked"
    checkpoint, prefix = open_checkpoint(target.path), _prefix(target)
    return {
        name.removeprefix(prefix): _load(checkpoint, name)
        for name in sorted(checkpoint.names())  # gradients are clipped by a sum over tensors in this order
        if name == FINAL_NORM or (name.startswith(prefix) and name.endswith(".weight"))
    }


def _prefix(target: LoadedTarget) -> str:
    """Of the names of the last block's tensors."""
    return f"model.layers.{target.model.num_layers - 1}."


def _load(checkpoint: Checkpoint, name: str) -> Tensor:
    loaded = checkpoint.load(name)
    if not isinstance(loaded, Tensor):
        raise ConfigError(f"model: tensor {name} is stored in blocks of few bits; train for the unquantized model")
    return loaded.float()
