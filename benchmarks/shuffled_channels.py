"""Writes a Llama model that computes the same with its channels in another order, to measure what rounding to groups costs.

Run: python -m benchmarks.shuffled_channels --output-folder FOLDER [--model smollm2-135m]

The default model's weights come from a file of 4-bit weights with a scale and an offset per 32 inputs. Rounded to such groups
again they lose nothing, which says nothing of other models. Here the channels of the residual stream, of each MLP and of the
heads' values are shuffled: the model computes the same, but neighbours come from different groups.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from forerun.models.checkpoint import dense, open_checkpoint, save_tensors
from forerun.models.config_file import read_config
from forerun.models.store import resolve_model

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")


def shuffle(tensors: Mapping[str, Tensor], *, num_heads: int, num_kv_heads: int, seed: int = 0) -> dict[str, Tensor]:
    """The same Llama model with its channels in a random order."""
    random = torch.Generator().manual_seed(seed)

    def order(count: int) -> Tensor:
        return torch.randperm(count, generator=random)

    hidden = order(tensors["model.norm.weight"].shape[0])
    inner: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}

    def by_head(weight: Tensor, heads: int, places: Tensor) -> Tensor:  # rows [heads * head_dim, ...]
        return weight.view(heads, -1, *weight.shape[1:])[:, places].flatten(0, 1)

    def shuffled(name: str, weight: Tensor) -> Tensor:
        found = LAYER.fullmatch(name)
        if found is None:  # embedding, head and final norm
            return weight[..., hidden]
        layer, part = found.groups()
        if layer not in inner:
            inner[layer] = order(tensors[f"model.layers.{layer}.mlp.up_proj.weight"].shape[0])
            values[layer] = order(tensors[f"model.layers.{layer}.self_attn.v_proj.weight"].shape[0] // num_kv_heads)
        reorders: dict[str, Callable[[Tensor], Tensor]] = {
            "self_attn.v_proj": lambda w: by_head(w[:, hidden], num_kv_heads, values[layer]),
            "self_attn.o_proj": lambda w: by_head(w[hidden].T, num_heads, values[layer]).T,
            "mlp.gate_proj": lambda w: w[inner[layer]][:, hidden],
            "mlp.up_proj": lambda w: w[inner[layer]][:, hidden],
            "mlp.down_proj": lambda w: w[hidden][:, inner[layer]],
        }
        return reorders[part](weight) if part in reorders else weight[..., hidden]

    return {name: shuffled(name, weight).contiguous() for name, weight in tensors.items()}


def main() -> None:
    """Write the folder of a shuffled model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--output-folder", type=Path, required=True)
    arguments = parser.parse_args()
    folder = resolve_model(arguments.model)
    config, checkpoint = read_config(folder), open_checkpoint(folder)
    if config.architectures != ["LlamaForCausalLM"]:
        raise SystemExit(f"--model: got {config.architectures}; must be a LlamaForCausalLM")
    tensors = {name: dense(checkpoint.load(name)) for name in checkpoint.names()}
    arguments.output_folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copy(file, arguments.output_folder)
    shuffled = shuffle(tensors, num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads)
    save_tensors(shuffled, arguments.output_folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
