"""Writes an EAGLE-3 head of random weights for a target, to measure the cost of drafting before one is trained.

    python -m benchmarks.random_head smollm2-135m /tmp/head --draft-vocab-size 8192
    forerun bench curve smollm2-135m --speculative-config '{"method": "eagle3", "model": "/tmp/head", "num_speculative_tokens": 4}'

Its drafts are nearly all wrong, but cost as much as those of a trained head of the same sizes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.models.config import DecoderConfig
from forerun.models.config_file import read_config
from forerun.models.families import decoder_config
from forerun.models.store import resolve_model

STD = 0.02


def main() -> None:
    """Read the arguments and write the head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="folder, .gguf file, known name or hub id")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    arguments = parser.parse_args()
    config = decoder_config(read_config(resolve_model(arguments.target)))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "config.json").write_text(json.dumps(head_config(config, arguments.draft_vocab_size), indent=2))
    save_file(head_tensors(config, arguments.draft_vocab_size), arguments.folder / "model.safetensors")


def head_config(target: DecoderConfig, draft_vocab_size: int) -> dict[str, object]:
    """An EAGLE-3 head as wide as its target."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "max_position_embeddings": target.max_model_len,
        "rms_norm_eps": target.norm_eps,
    }


def head_tensors(target: DecoderConfig, draft_vocab_size: int) -> dict[str, Tensor]:
    """The head's weights; its draft vocabulary is the first tokens of the target's."""
    width, inner = target.hidden_size, target.intermediate_size
    query, kv = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    shapes = {
        "fc": (width, 3 * width),
        "midlayer.self_attn.q_proj": (query, 2 * width),
        "midlayer.self_attn.k_proj": (kv, 2 * width),
        "midlayer.self_attn.v_proj": (kv, 2 * width),
        "midlayer.self_attn.o_proj": (width, query),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
        "lm_head": (draft_vocab_size, width),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    source = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": (STD * torch.randn(shape, generator=source)).bfloat16() for name, shape in shapes.items()
    }
    tensors |= {f"{name}.weight": torch.ones(width, dtype=torch.bfloat16) for name in norms}
    tensors["d2t"] = torch.zeros(draft_vocab_size, dtype=torch.int64)
    return tensors


if __name__ == "__main__":
    main()
