"""Tiny models of every family in GGUF files, written as llama.cpp's converter does, beside the same models as folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from transformers import AutoConfig

from tests.tiny_gguf import add_tiny_pieces, add_tiny_tokenizer
from tests.tiny_models import save_tiny_model

VOCAB, PIECES_VOCAB = 264, 288
LAYERS = {"num_hidden_layers": 7}
"""Enough for a Gemma 3 layer, every sixth, and a SmolLM3 layer, every fourth, that differ from the others."""

YARN_TO_THE_END = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 128,
    "truncate": False,
}
"""As gpt-oss has it; llama.cpp rounds the ramp's ends in its files too."""

FAMILY_GGUFS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama with biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama with wide heads": ("LlamaForCausalLM", {"head_dim": 16}),
    "llama linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama yarn": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama 3.1": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
    ),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": False}),
    "qwen3": ("Qwen3ForCausalLM", {"use_sliding_window": False, "layer_types": None}),
    "llama with experts": ("MixtralForCausalLM", {"sliding_window": None}),
    "qwen3moe": ("Qwen3MoeForCausalLM", {}),
    "smollm3": (
        "SmolLM3ForCausalLM",
        LAYERS
        | {
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": [1, 1, 1, 0, 1, 1, 1],
            "layer_types": None,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        LAYERS | {"layer_types": None, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        LAYERS
        | {
            "layer_types": None,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
            "final_logit_softcapping": None,
        },
    ),
    "phi3": ("Phi3ForCausalLM", {}),
    "phi3 in part": (
        "Phi3ForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "phi3 longrope": (
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.5, 2.0, 4.0],
                "long_factor": [1.0, 3.0, 8.0, 20.0],
            },
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmoe": ("OlmoeForCausalLM", {"num_key_value_heads": 6}),
    "granite": ("GraniteForCausalLM", {}),
    "granitemoe": ("GraniteMoeForCausalLM", {}),
    "gpt-oss": ("GptOssForCausalLM", {"rope_parameters": YARN_TO_THE_END}),
    "gpt-oss unstretched": (
        "GptOssForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
}
"""Architecture and what differs from `tiny_models`: GGUF has no words for windows of some families, for example."""

GEMMA = ("gemma2", "gemma3")
SANDWICHED = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
}
EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.0\.(\w+)\.weight")
EXPERT_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def save_family(folder: Path, kind: str, *, has_pieces: bool = False) -> Path:
    """Write a model to `folder`, and beside its safetensors the same model as model.gguf; return that file's path.

    `has_pieces`: its vocabulary is SentencePiece's.
    """
    architecture, overrides = FAMILY_GGUFS[kind]
    save_tiny_model(folder, architecture, vocab_size=PIECES_VOCAB if has_pieces else VOCAB, **overrides)
    config = AutoConfig.from_pretrained(folder)
    name = kind.split()[0]
    writer = gguf.GGUFWriter(str(folder / "gguf" / "model.gguf"), name)
    (folder / "gguf").mkdir()
    _add_sizes(writer, config)
    _add_rope(writer, name, config)
    _add_own(writer, name, config)
    if has_pieces:
        add_tiny_pieces(writer, gemma=name in GEMMA)
    else:
        add_tiny_tokenizer(writer, folder / "words")
    tensors = load_file(folder / "model.safetensors")
    for stored, tensor in _with_stacked_experts(tensors).items():
        if not (config.tie_word_embeddings and stored == "lm_head.weight"):
            writer.add_tensor(*_as_stored(name, stored, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "gguf" / "model.gguf"


def _with_stacked_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The matrices of all experts of a layer as one tensor, under its name in the file."""
    stacked = {}
    for name in tensors:
        if found := EXPERT.fullmatch(name):
            names = [name.replace(".experts.0.", f".experts.{number}.") for number in range(len(tensors))]
            stacked[f"blk.{found[1]}.ffn_{EXPERT_PARTS[found[2]]}_exps.weight"] = np.stack(
                [tensors[name] for name in names if name in tensors]
            )
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        if ".experts.gate_up_proj" in name:  # gpt-oss's, [inputs, outputs], each gate before its up
            ending = "bias" if name.endswith("bias") else "weight"
            for part, values in {"gate": tensors[name][..., ::2], "up": tensors[name][..., 1::2]}.items():
                stacked[f"blk.{layer}.ffn_{part}_exps.{ending}"] = _outputs_first(values)
            down = tensors[name.replace("gate_up", "down")]
            stacked[f"blk.{layer}.ffn_down_exps.{ending}"] = _outputs_first(down)
        if name.endswith("input_linear.weight"):
            gates, ups = np.split(tensors[name], 2, axis=1)
            stacked[f"blk.{layer}.ffn_gate_exps.weight"], stacked[f"blk.{layer}.ffn_up_exps.weight"] = gates, ups
            stacked[f"blk.{layer}.ffn_down_exps.weight"] = tensors[name.replace("input_", "output_")]
    others = {name: x for name, x in tensors.items() if ".experts." not in name and "put_linear." not in name}
    return others | stacked


def _outputs_first(values: np.ndarray) -> np.ndarray:
    """Matrices of all experts [experts, inputs, outputs] as a file has them; biases stay."""
    return np.ascontiguousarray(values.swapaxes(1, 2)) if values.ndim == 3 else np.ascontiguousarray(values)


def _add_sizes(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_dimension_count(int(head_dim * rope.get("full_attention", rope).get("partial_rotary_factor", 1.0)))


def _add_rope(writer: gguf.GGUFWriter, name: str, config: Any) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        factor = np.sqrt(1 + np.log(config.max_position_embeddings / original) / np.log(original))
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(factor))
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.float32(rope[f"{length}_factor"]))
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, config.head_dim))


def _llama3_factors(rope: dict[str, Any], dim: int) -> np.ndarray:
    """What llama.cpp divides each frequency by."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    wavelengths = 2 * np.pi / frequencies
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(wavelengths > original / low, rope["factor"], between)
    return np.where(wavelengths < original / high, 1.0, factors).astype(np.float32)


def _add_own(writer: gguf.GGUFWriter, name: str, config: Any) -> None:
    """What one family has and others do not."""
    if name in (*GEMMA, "phi3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if experts := getattr(config, "num_local_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if name == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if name == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if name in ("granite", "granitemoe"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _as_stored(name: str, stored: str, tensor: np.ndarray, config: Any) -> tuple[str, np.ndarray]:
    """Name and values of a tensor in the file."""
    if name in ("llama", "smollm3", "granite", "granitemoe") and (".q_proj." in stored or ".k_proj." in stored):
        heads = config.num_attention_heads if ".q_proj." in stored else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
        tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
    if name in GEMMA and stored.endswith("norm.weight"):
        tensor = tensor + 1
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    whole["lm_head.weight"] = "output.weight"
    if stored in whole:
        return whole[stored], tensor
    if stored.startswith("blk."):
        return stored, tensor
    _, _, layer, part = stored.split(".", 3)
    if part == "self_attn.sinks":
        return f"blk.{layer}.attn_sinks.weight", tensor
    part, ending = part.rsplit(".", 1)
    parts = PARTS | (SANDWICHED if name in (*GEMMA, "olmo2") else {})
    if name == "gpt-oss":
        parts |= {"post_attention_layernorm": "post_attention_norm"}
    return f"blk.{layer}.{parts[part]}.{ending}", tensor
