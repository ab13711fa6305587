"""Tiny random checkpoints of every architecture that the decoder has a row for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from forerun.models.families import FAMILIES

COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 7
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", {}),
    "MistralForCausalLM": ("MistralConfig", {"sliding_window": WINDOW}),
    "Qwen2ForCausalLM": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "Qwen3ForCausalLM": (
        "Qwen3Config",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "MixtralForCausalLM": (
        "MixtralConfig",
        {"sliding_window": WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "Qwen3MoeForCausalLM": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "OlmoeForCausalLM": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 3}),
    "SmolLM3ForCausalLM": (
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "Gemma2ForCausalLM": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "Gemma3ForCausalLM": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 20.0,
        },
    ),
    "Phi3ForCausalLM": ("Phi3Config", {"sliding_window": WINDOW}),
    "Olmo2ForCausalLM": ("Olmo2Config", {}),
    "GraniteForCausalLM": (
        "GraniteConfig",
        {
            "embedding_multiplier": 1.7,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.3,
        },
    ),
    "GraniteMoeForCausalLM": (
        "GraniteMoeConfig",
        {
            "embedding_multiplier": 1.7,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.3,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    "GptOssForCausalLM": (
        "GptOssConfig",
        {"head_dim": 16, "sliding_window": WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
}


WITH_EXPERTS = (
    *("GptOssForCausalLM", "GraniteMoeForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"),
)
DENSE_FAMILIES = [architecture for architecture in FAMILIES if architecture not in WITH_EXPERTS]


def tiny_config(architecture: str, **overrides: Any) -> Any:
    """A transformers config of `architecture` small enough for tests, with a window that matters."""
    if architecture == "Gemma3ForConditionalGeneration":
        text = tiny_config("Gemma3ForCausalLM", **overrides)
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return transformers.Gemma3Config(
            architectures=[architecture],
            text_config=text.to_dict(),
            vision_config={**vision, "image_size": 28, "patch_size": 14},
            tie_word_embeddings=text.tie_word_embeddings,
        )
    class_name, special = SPECIAL[architecture]
    settings = {"vocab_size": 128, **COMMON, **special, **overrides}
    return getattr(transformers, class_name)(architectures=[architecture], **settings)


def save_tiny_model(
    folder: Path, architecture: str = "LlamaForCausalLM", *, seed: int = 0, vocab_size: int = 128, **overrides: Any
) -> Path:
    """Save random fp32 weights (no tokenizer) to `folder`; no norm weight and no bias is left at its initial value."""
    config = tiny_config(architecture, vocab_size=vocab_size, **overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(folder)
    return Path(folder)
