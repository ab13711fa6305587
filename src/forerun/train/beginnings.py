"""Heads before training, in their published layouts, sized after the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.models.base import TargetModel

NORM_EPS = 1e-5
MLP_MULTIPLE = 16  # the MLP is about 8/3 as wide as the stream, as Llama's is


class FirstValues:
    """Seeded values by name, from which training begins: matrices uniform within 1 / sqrt(inputs), norms at one.

    `counts` [vocab_size]: how often each token occurs in the texts.
    """

    def __init__(self, counts: Tensor, *, seed: int) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._counts = counts
        self._source = torch.Generator().manual_seed(seed)

    def matrix(self, name: str, outputs: int, inputs: int) -> None:
        """A linear layer's weight."""
        drawn = torch.rand(outputs, inputs, generator=self._source)
        self.tensors[f"{name}.weight"] = (2 * drawn - 1) / inputs**0.5

    def norm(self, name: str, width: int) -> None:
        """A norm's weight."""
        self.tensors[f"{name}.weight"] = torch.ones(width)

    def layer(self, prefix: str, config: Mapping[str, Any], *, inputs: int) -> None:
        """A decoder layer whose attention reads rows `inputs` wide, but for the norms before its attention."""
        width, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        query_rows, kv_rows = head_dim * config["num_attention_heads"], head_dim * config["num_key_value_heads"]
        for name, rows in (("q", query_rows), ("k", kv_rows), ("v", kv_rows)):
            self.matrix(f"{prefix}self_attn.{name}_proj", rows, inputs)
        self.matrix(f"{prefix}self_attn.o_proj", width, query_rows)
        self.norm(f"{prefix}post_attention_layernorm", width)
        self.matrix(f"{prefix}mlp.gate_proj", inner, width)
        self.matrix(f"{prefix}mlp.up_proj", inner, width)
        self.matrix(f"{prefix}mlp.down_proj", width, inner)

    def reduced_head(self, model: TargetModel, num_draft: int) -> None:
        """A head over the `num_draft` most frequent tokens, with the target's rows for them, and the maps to its vocabulary."""
        ids = self._counts.argsort(descending=True, stable=True)[:num_draft].sort().values
        self.tensors["lm_head.weight"] = model.head_rows(ids.to(model.device)).cpu().float()
        self.tensors["d2t"] = ids - torch.arange(num_draft)
        self.tensors["t2d"] = torch.zeros(model.vocab_size, dtype=torch.bool).index_fill(0, ids, value=True)


def llama_config(model: TargetModel) -> dict[str, Any]:
    """A Llama layer of the target's width and with its keys."""
    width, keys = model.hidden_size, model.kv_specs[0]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": width,
        "head_dim": keys.key_dim,
        "num_attention_heads": max(1, width // keys.key_dim // keys.num_kv_heads) * keys.num_kv_heads,
        "num_key_value_heads": keys.num_kv_heads,
        "intermediate_size": -(-8 * width // (3 * MLP_MULTIPLE)) * MLP_MULTIPLE,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": 10000.0,
        "max_position_embeddings": model.max_model_len,
        "vocab_size": model.vocab_size,
    }


def begin_eagle(model: TargetModel, changes: Mapping[str, Any], first: FirstValues) -> dict[str, Any]:
    """EAGLE-1's and -2's: fill in `first`, return config.json's content."""
    config = {**llama_config(model), "bias": False, **changes}
    width = config["hidden_size"]
    first.matrix("fc", width, 2 * width)
    first.layer("layers.0.", config, inputs=width)
    return config


def begin_eagle3(model: TargetModel, changes: Mapping[str, Any], first: FirstValues) -> dict[str, Any]:
    """EAGLE-3's; where `draft_vocab_size` is below the target's, the head begins as the target's rows."""
    last = model.num_layers
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": model.vocab_size,
        "eagle_aux_hidden_state_layer_ids": sorted({min(2, last), last // 2, max(last - 3, 0)}),
    }
    config = {**llama_config(model), **own, **changes}
    width, num_features = config["hidden_size"], len(config["eagle_aux_hidden_state_layer_ids"])
    first.matrix("fc", width, num_features * model.hidden_size)
    first.layer("midlayer.", config, inputs=2 * width)
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        first.norm(name, width)
    if config["draft_vocab_size"] < model.vocab_size:
        first.reduced_head(model, config["draft_vocab_size"])
    return config
