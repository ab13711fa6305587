"""The configurations and initial weights of heads, in their published layouts, sized after the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.models.base import TargetModel
from forerun.models.config import PRE_NORMS, DecoderConfig, QKNorm
from forerun.models.decoder import Decoder

NORM_EPS = 1e-5
MLP_MULTIPLE = 16  # the MLP is about 8/3 as wide as the stream, as Llama's is


class InitialWeights:
    """Collects the initial tensors of a head by name: matrices uniform within 1 / sqrt(inputs), norms at one.

    `counts` [vocab_size] says how often each token occurs in the texts, for reduced vocabularies.
    """

    def __init__(self, counts: Tensor, *, seed: int) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._counts = counts
        self._source = torch.Generator().manual_seed(seed)

    def matrix(self, name: str, outputs: int, inputs: int) -> None:
        """Add a linear layer's weight."""
        drawn = torch.rand(outputs, inputs, generator=self._source)
        self.tensors[f"{name}.weight"] = (2 * drawn - 1) / inputs**0.5

    def norm(self, name: str, width: int) -> None:
        """Add a norm's weight."""
        self.tensors[f"{name}.weight"] = torch.ones(width)

    def near(self, name: str, values: Tensor) -> None:
        """Add given values with a little noise, since equal tensors would be shared when loaded, and train as one."""
        self.tensors[name] = values + 1e-3 * torch.randn(values.shape, generator=self._source)

    def layer(self, prefix: str, config: Mapping[str, Any], *, inputs: int) -> None:
        """Add a decoder layer whose attention reads rows `inputs` wide, without the norms before its attention."""
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
        """Add an LM head over the `num_draft` most frequent tokens, copied from the target's, and its vocabulary maps."""
        ids = self._counts.argsort(descending=True, stable=True)[:num_draft].sort().values
        self.tensors |= reduced_head(model, ids)


def reduced_head(model: TargetModel, draft_ids: Tensor) -> dict[str, Tensor]:
    """Return the target's LM head for some of its tokens [V], ascending, fp32, and the maps between both vocabularies."""
    return {
        "lm_head.weight": model.head_rows(draft_ids.to(model.device)).cpu().float(),
        "d2t": draft_ids - torch.arange(len(draft_ids)),
        "t2d": torch.zeros(model.vocab_size, dtype=torch.bool).index_fill(0, draft_ids, value=True),
    }


def feature_layers(num_layers: int) -> list[int]:
    """The layers of a target whose inputs an EAGLE-3 head reads: an early one, a middle one and a late one (arXiv 2503.01840)."""
    return sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)})


def has_llama_parts(model: TargetModel) -> TypeGuard[Decoder]:
    """Whether a target's layers have norms where Llama's have them, and nowhere else, and one MLP."""
    return (
        isinstance(model, Decoder)
        and model.config.norms == PRE_NORMS
        and model.config.qk_norm is QKNorm.NONE
        and model.config.experts is None
    )


def llama_config(model: TargetModel) -> dict[str, Any]:
    """Return the config.json of a one-layer Llama with the target's width and its number and size of keys."""
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


def init_eagle(model: TargetModel, changes: Mapping[str, Any], first: InitialWeights) -> dict[str, Any]:
    """Begin an EAGLE-1 or -2 head: add its tensors to `first` and return its config.json, as all functions that follow do."""
    config = {**llama_config(model), "bias": False, **changes}
    width = config["hidden_size"]
    first.matrix("fc", width, 2 * width)
    first.layer("layers.0.", config, inputs=width)
    return config


def init_eagle3(model: TargetModel, changes: Mapping[str, Any], first: InitialWeights) -> dict[str, Any]:
    """Begin an EAGLE-3 head; with a `draft_vocab_size` below the target's, its LM head is initialised with the target's rows.

    Raises:
        ConfigError: the draft vocabulary is empty or larger than the target's.
    """
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": model.vocab_size,
        "eagle_aux_hidden_state_layer_ids": feature_layers(model.num_layers),
    }
    config = {**llama_config(model), **own, **changes}
    if not 1 <= config["draft_vocab_size"] <= model.vocab_size:
        raise ConfigError(
            f"draft_vocab_size: got {config['draft_vocab_size']}; must be from 1 to {model.vocab_size}, the target's vocabulary"
        )
    width, num_features = config["hidden_size"], len(config["eagle_aux_hidden_state_layer_ids"])
    first.matrix("fc", width, num_features * model.hidden_size)
    first.layer("midlayer.", config, inputs=2 * width)
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        first.norm(name, width)
    if config["draft_vocab_size"] < model.vocab_size:
        first.reduced_head(model, config["draft_vocab_size"])
    return config


def init_peagle(model: TargetModel, changes: Mapping[str, Any], first: InitialWeights) -> dict[str, Any]:
    """Begin a P-EAGLE head: EAGLE-3's and the state of the mask, whose token is the last of the vocabulary."""
    config = init_eagle3(model, {"mask_token_id": model.vocab_size - 1, **changes}, first)
    num_features = len(config["eagle_aux_hidden_state_layer_ids"])
    first.tensors["mask_hidden"] = torch.zeros(1, 1, num_features * model.hidden_size)
    return config


def init_pard(model: TargetModel, changes: Mapping[str, Any], first: InitialWeights) -> dict[str, Any]:
    """Begin a PARD draft model: a whole Llama of two layers, as wide as the target; the mask is the last token of the vocabulary."""
    config = {**llama_config(model), "num_hidden_layers": 2, "pard_token": model.vocab_size - 1, **changes}
    width = config["hidden_size"]
    for name in ("model.embed_tokens", "lm_head"):
        first.matrix(name, model.vocab_size, width)
    for index in range(config["num_hidden_layers"]):
        first.layer(f"model.layers.{index}.", config, inputs=width)
        first.norm(f"model.layers.{index}.input_layernorm", width)
    first.norm("model.norm", width)
    return config


def init_medusa(model: TargetModel, changes: Mapping[str, Any], first: InitialWeights) -> dict[str, Any]:
    """Begin Medusa heads: residual blocks that begin as the identity, and the target's LM head, as the authors initialise it."""
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "vocab_size": model.vocab_size, **changes}
    width = model.hidden_size
    rows = model.head_rows(torch.arange(model.vocab_size, device=model.device)).cpu().float()
    for head in range(config["medusa_num_heads"]):
        for block in range(config["medusa_num_layers"]):
            first.near(f"{head}.{block}.linear.weight", torch.zeros(width, width))
            first.near(f"{head}.{block}.linear.bias", torch.zeros(width))
        first.near(f"{head}.{config['medusa_num_layers']}.weight", rows)
    return config


def init_mlp_speculator(model: TargetModel, changes: Mapping[str, Any], first: InitialWeights) -> dict[str, Any]:
    """Begin an MLP speculator of three steps, as wide as the target."""
    named = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}
    own = {"n_predict": 3, "emb_dim": model.hidden_size, "inner_dim": 0, "vocab_size": model.vocab_size}
    config = {**named, **own, "tie_weights": False, "scale_input": True, **changes}
    inner, is_tied = config["inner_dim"] or config["emb_dim"], config["tie_weights"]
    for step in range(config["n_predict"]):
        if not is_tied or step < 2:  # the first one's inputs are the target's
            first.matrix(f"proj.{step}", inner, inner if step else config["emb_dim"])
        if is_tied and step:
            continue
        for name in ("emb", "head"):
            first.matrix(f"{name}.{step}", model.vocab_size, inner)
        first.near(f"ln.{step}.weight", torch.ones(inner))
        first.near(f"ln.{step}.bias", torch.zeros(inner))
    return config


def init_mtp(model: TargetModel, changes: Mapping[str, Any], first: InitialWeights) -> dict[str, Any]:
    """Begin a multi-token prediction layer in DeepSeek's layout, to be stored beside the target's own tensors.

    Raises:
        ConfigError: the target's layers differ from Llama's, which are the only ones that can be made here.
    """
    if not has_llama_parts(model) or _has_other_matrices(model.config):
        raise ConfigError(
            "kind of head: 'mtp' begins from layers like Llama's, this target has others; train another kind"
        )
    own = model.config
    config = {
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": own.norm_eps,
        "hidden_size": own.hidden_size,
        "intermediate_size": own.intermediate_size,
        "head_dim": own.head_dim,
        "num_attention_heads": own.num_heads,
        "num_key_value_heads": own.num_kv_heads,
        **changes,
    }
    width, prefix = own.hidden_size, f"model.layers.{model.num_layers}."
    first.matrix(f"{prefix}eh_proj", width, 2 * width)
    first.layer(prefix, config, inputs=width)
    for name in ("input_layernorm", "enorm", "hnorm", "shared_head.norm"):
        first.norm(f"{prefix}{name}", width)
    return config


def _has_other_matrices(config: DecoderConfig) -> bool:
    """Whether layers have biases, or their matrices are stored in one, unlike most of Llama's."""
    return config.qkv_bias or config.output_bias or config.mlp_bias or config.stored_fused


def init_dflash(model: TargetModel, changes: Mapping[str, Any], first: InitialWeights) -> dict[str, Any]:
    """Begin a DFlash head: one layer and blocks of four; the mask is the last token of the vocabulary."""
    layers = sorted({min(1, model.num_layers - 1), model.num_layers // 2, model.num_layers - 1})
    own = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "dflash_config": {
            "mask_token_id": model.vocab_size - 1,
            "target_layer_ids": [layer - 1 for layer in layers],
        },
    }
    config = {**llama_config(model), **own, **changes}
    width = config["hidden_size"]
    first.matrix("fc", width, len(config["dflash_config"]["target_layer_ids"]) * model.hidden_size)
    for name in ("hidden_norm", "norm"):
        first.norm(name, width)
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        first.layer(prefix, config, inputs=width)
        first.norm(f"{prefix}input_layernorm", width)
        for name in ("q_norm", "k_norm"):
            first.norm(f"{prefix}self_attn.{name}", config["head_dim"])
    return config
