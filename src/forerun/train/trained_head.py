"""Reads a head that was trained before, to train it further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.models.base import LoadedTarget
from forerun.models.checkpoint import open_checkpoint
from forerun.models.heads.eagle3 import DRAFTS_BOTH, MASK, canonical_name, load_eagle3
from forerun.models.model_folder import CONFIG_FILE, read_json
from forerun.ops.block_weight import BlockWeight
from forerun.train.packaging import OUTSIDE_LAYER


def begin_from_head(folder: Path, target: LoadedTarget) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Begin with a head of `forerun train`, as it is stored.

    Args:
        folder: of the head, in any layout, in bf16 or int8.
        target: the one that it drafts for.

    Returns:
        The content of config.json and the tensors in the authors' layout, floats in fp32.

    Raises:
        ModelError: the head is missing, damaged or made for another target.
        ConfigError: it has not one layer with a draft vocabulary of its own, as heads of `forerun train` have.
    """
    load_eagle3(folder, target)  # checks it
    stored = read_json(folder / CONFIG_FILE)
    content = {name: stored[name] for name in OUTSIDE_LAYER if name in stored}
    content |= stored.get("transformer_layer_config") or {
        name: value for name, value in stored.items() if name != "quantization_config"
    }
    content["architectures"] = ["LlamaForCausalLMEagle3"]
    checkpoint = open_checkpoint(folder)
    tensors = {_authors_name(name): _dense(checkpoint.load(name)) for name in sorted(checkpoint.names())}
    if content.get("num_hidden_layers") != 1 or not {"d2t", "lm_head.weight", "fc.weight"} <= tensors.keys():
        raise ConfigError(
            f"--begin-with: the head in {folder} has {content.get('num_hidden_layers')} layers and the tensors "
            f"{', '.join(sorted(tensors))}; must be one of forerun train: of one layer, with fc, lm_head and d2t"
        )
    if MASK not in tensors:  # trained before masks were
        tensors[MASK] = torch.zeros(1, 1, tensors["fc.weight"].shape[1])
        content |= {"mask_token_id": target.model.vocab_size - 1, DRAFTS_BOTH: True}
    return content, tensors


def draft_ids_of(tensors: dict[str, Tensor]) -> Tensor:
    """The target's tokens that a head can draft, [V] ascending."""
    return torch.arange(len(tensors["d2t"])) + tensors["d2t"]


def _authors_name(name: str) -> str:
    """The name that a tensor has in the authors' layout, of whatever layout it comes."""
    name = canonical_name(name)
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _dense(stored: Tensor | BlockWeight) -> Tensor:
    tensor = stored.dequantize() if isinstance(stored, BlockWeight) else stored
    return tensor.float() if tensor.is_floating_point() else tensor
