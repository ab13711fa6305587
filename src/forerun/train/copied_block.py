"""An EAGLE-3 head that begins as a copy of one of the target's blocks, over a part of its vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.models.base import LoadedTarget
from forerun.models.checkpoint import open_checkpoint
from forerun.models.config import PRE_NORMS, QKNorm
from forerun.models.decoder import Decoder
from forerun.models.heads.eagle3 import DRAFTS_BOTH, MASK

FINAL_NORM = "model.norm.weight"

OF_EMBEDDINGS = 0.02  # deviation of the weights that read the token's embedding, which the block has no part for


def feature_layers(num_layers: int) -> list[int]:
    """The layers of a target whose inputs a head reads: an early one, a middle one and a late one (arXiv 2503.01840)."""
    return sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)})


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
    model = target.model
    if not isinstance(model, Decoder) or model.config.norms != PRE_NORMS or model.config.qk_norm is not QKNorm.NONE:
        raise ConfigError(
            "model: forerun train begins from blocks like Llama's, this model has others; train_head can begin anew"
        )
    config, last = model.config, model.num_layers
    layer_ids = feature_layers(last)
    source = torch.Generator().manual_seed(seed)
    block = _read_block(target, last - 1)
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
    tensors["lm_head.weight"] = model.head_rows(draft_ids.to(model.device)).cpu().float().clone()
    tensors[MASK] = torch.zeros(1, 1, num_features * width)
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    tensors["t2d"] = torch.zeros(model.vocab_size, dtype=torch.bool).index_fill(0, draft_ids, value=True)
    content = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": width,
        "head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": _rope_theta(config),
        "max_position_embeddings": model.max_model_len,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": len(draft_ids),
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "mask_token_id": model.vocab_size - 1,
        DRAFTS_BOTH: True,
    }
    return content, tensors


def _rope_theta(config: Any) -> float:
    rope = config.ropes[0]
    return 10000.0 if rope is None else float(rope.theta)


def _read_block(target: LoadedTarget, index: int) -> dict[str, Tensor]:
    """Read the tensors of a block from the target's files, in fp32, named as within the block, and the final norm."""
    prefix = f"model.layers.{index}."
    if target.path is None:
        raise ConfigError("model: was made in memory; forerun train reads a block of it from its files")
    checkpoint = open_checkpoint(target.path)
    found: dict[str, Tensor] = {}
    for name in checkpoint.names():
        if name == FINAL_NORM or (name.startswith(prefix) and name.endswith(".weight")):
            loaded = checkpoint.load(name)
            if not isinstance(loaded, Tensor):
                raise ConfigError(
                    f"model: tensor {name} is stored in blocks of few bits; train for the unquantized model"
                )
            found[name.removeprefix(prefix)] = loaded.float()
    if not {"self_attn.q_proj.weight", FINAL_NORM} <= found.keys():
        raise ConfigError(
            f"model: has no tensors {prefix}self_attn.q_proj.weight and so on; give one with Llama's names"
        )
    return found
