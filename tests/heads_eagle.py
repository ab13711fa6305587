"""Tiny random EAGLE heads in the layouts they are published in."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYER = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 56, "rms_norm_eps": 1e-5}
HEAD_DIM = 12
STD = 0.2


class Tensors(dict):
    """Seeded random tensors by name."""

    def __init__(self, seed=0):
        self.source = torch.Generator().manual_seed(seed)

    def add(self, name, *shape):
        self[name] = STD * torch.randn(shape, generator=self.source)

    def add_norm(self, name, width):
        self[f"{name}.weight"] = 1 + STD * torch.randn(width, generator=self.source)

    def add_layer(self, prefix, *, width, inputs, qk_norm=False):
        heads, kv_heads, inner = LAYER["num_attention_heads"], LAYER["num_key_value_heads"], LAYER["intermediate_size"]
        self.add(f"{prefix}self_attn.q_proj.weight", heads * HEAD_DIM, inputs)
        for name in "kv":
            self.add(f"{prefix}self_attn.{name}_proj.weight", kv_heads * HEAD_DIM, inputs)
        self.add(f"{prefix}self_attn.o_proj.weight", width, heads * HEAD_DIM)
        for name in ("gate", "up"):
            self.add(f"{prefix}mlp.{name}_proj.weight", inner, width)
        self.add(f"{prefix}mlp.down_proj.weight", width, inner)
        self.add_norm(f"{prefix}post_attention_layernorm", width)
        if qk_norm:
            self.add_norm(f"{prefix}self_attn.q_norm", HEAD_DIM)
            self.add_norm(f"{prefix}self_attn.k_norm", HEAD_DIM)


def save(folder, config, tensors):
    """Write config.json and model.safetensors; returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def save_damaged(folder, make, target, *, config=None, drop=(), add=None, **options):
    """Save what `make` gives for a target and options, with other values in its config, and tensors dropped or added."""
    content, tensors = make(target, **options)
    for name in drop:
        del tensors[name]
    return save(folder, content | (config or {}), dict(tensors) | (add or {}))


def eagle(target, *, seed=0, bias=False, num_layers=1, **changes):
    """EAGLE-1's (config, tensors) for a target: no norm before the first layer's attention, no final norm, no head."""
    width = target.model.hidden_size
    tensors = Tensors(seed)
    tensors.add("fc.weight", width, 2 * width)
    if bias:
        tensors.add("fc.bias", width)
    for index in range(num_layers):
        tensors.add_layer(f"layers.{index}.", width=width, inputs=width)
        if index:
            tensors.add_norm(f"layers.{index}.input_layernorm", width)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": num_layers,
        "vocab_size": target.model.vocab_size,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        **LAYER,
    }
    return config | changes, tensors


def draft_ids(vocab_size, num_draft, seed=0):
    """Which of the target's tokens a reduced vocabulary holds, ascending."""
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:num_draft].sort().values


def eagle3(target, *, seed=0, num_draft=40, num_aux=3, num_layers=1, width=None, own_embedding=False, **flags):
    """EAGLE-3's (config, tensors) for a target, in the authors' layout."""
    model = target.model
    width = width or model.hidden_size
    tensors = Tensors(seed)
    tensors.add("fc.weight", width, num_aux * model.hidden_size)
    tensors.add_layer("midlayer.", width=width, inputs=2 * width)
    for name in ("input_layernorm", "hidden_norm"):
        tensors.add_norm(f"midlayer.{name}", width)
    for index in range(1, num_layers):
        tensors.add_layer(f"layers.{index}.", width=width, inputs=width)
        tensors.add_norm(f"layers.{index}.input_layernorm", width)
    tensors.add_norm("norm", width)
    tensors.add("lm_head.weight", num_draft, width)
    if own_embedding:
        tensors.add("embed_tokens.weight", model.vocab_size, width)
    if num_draft != model.vocab_size:
        ids = draft_ids(model.vocab_size, num_draft)
        tensors["d2t"] = ids - torch.arange(num_draft)
        tensors["t2d"] = torch.zeros(model.vocab_size, dtype=torch.bool).index_fill(0, ids, value=True)
    if flags.get("norm_before_fc"):
        tensors.add_norm("input_norm", num_aux * model.hidden_size)
    if flags.get("fc_norm"):
        for i in range(num_aux):
            tensors.add_norm(f"fc_norm.{i}", model.hidden_size)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": num_layers,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": num_draft,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3][-num_aux:],
        **LAYER,
    }
    return config | flags, tensors


def peagle(target, *, mask_token=7, num_aux=3, **options):
    """P-EAGLE's (config, tensors) for a target: EAGLE-3's, a mask token, and what stands for features that are not known."""
    config, tensors = eagle3(target, num_aux=num_aux, **options)
    tensors.add("mask_hidden", 1, 1, num_aux * target.model.hidden_size)
    return config | {"mask_token_id": mask_token}, tensors


def in_speculators_layout(config, tensors, *, kind):
    """The same checkpoint as speculators writes it."""
    layers = {key: value for key, value in config.items() if key not in ("architectures", "draft_vocab_size")}
    top = {key: config.pop(key) for key in ("draft_vocab_size", "mask_token_id") if key in config}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "proposal_methods": [{"speculative_tokens": 4}]},
        "transformer_layer_config": layers,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": layers["eagle_aux_hidden_state_layer_ids"],
        **top,
    }
    return config, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
