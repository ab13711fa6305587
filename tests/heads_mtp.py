"""Tiny random targets with MTP layers in the published layouts, and what those compute, from their formulas."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, Glm4MoeLiteConfig, Qwen3MoeConfig

from tests.tiny_models import COMMON, save_tiny_model

EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}
WITHOUT_WINDOW = {"use_sliding_window": False}


@dataclass(frozen=True)
class Kind:
    """How one family stores its MTP layers and what it does, as the families' papers and code tell."""

    prefix: str  # of layer 0
    block: str
    norms: tuple[str, str, str]  # of embedding, state and output
    projection: str
    embedding_first: bool = True
    zeroes_first: bool = True
    takes_normed: bool = True
    recycles_normed: bool = True
    norm_offset: float = 0.0


DEEPSEEK = Kind("model.layers.3.", "", ("enorm", "hnorm", "shared_head.norm"), "eh_proj")
QWEN3 = Kind(
    "mtp.",
    "layers.0.",
    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    "fc",
    zeroes_first=False,
    norm_offset=1.0,
)
GLM4 = Kind(DEEPSEEK.prefix, "", DEEPSEEK.norms, "eh_proj", recycles_normed=False)
KINDS = {
    "llama": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": GLM4,
    "glm4_moe_lite": GLM4,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3,
    "mimo": Kind(
        "model.mtp_layers.0.",
        "",
        ("token_layernorm", "hidden_layernorm", "final_layernorm"),
        "input_proj",
        embedding_first=False,
        takes_normed=False,
    ),
}


def save_mtp_target(folder, name, *, vocab_size=97):
    """A tiny target of three layers, and one MTP layer beside it."""
    if name == "deepseek_v3":
        _save(folder, DeepseekV3Config(**COMMON | EXPERTS | LATENT, vocab_size=vocab_size))
    elif name == "glm4_moe":
        _save(folder, Glm4MoeConfig(**COMMON | EXPERTS, head_dim=8, use_qk_norm=True, vocab_size=vocab_size))
    elif name == "glm4_moe_lite":
        kinds = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
        _save(folder, Glm4MoeLiteConfig(**COMMON | EXPERTS | LATENT | kinds, vocab_size=vocab_size))
    elif name == "qwen3_moe":
        _save(folder, Qwen3MoeConfig(**COMMON | EXPERTS, num_experts=4, head_dim=8, vocab_size=vocab_size))
    elif name == "llama":
        save_tiny_model(folder, seed=1, vocab_size=vocab_size)
    else:
        architecture = {"qwen3": "Qwen3ForCausalLM", "mimo": "Qwen2ForCausalLM"}[name]
        save_tiny_model(folder, architecture, seed=1, vocab_size=vocab_size, **WITHOUT_WINDOW)
    return add_mtp_layers(folder, name)


def add_mtp_layers(folder, name, count=1):
    """Store `count` random MTP layers beside the target in `folder`, each with a decoder layer like its last."""
    kind = KINDS[name]
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    width, last = config["hidden_size"], f"model.layers.{config['num_hidden_layers'] - 1}."
    shapes = {f"{kind.block}{key.removeprefix(last)}": w.shape for key, w in weights.items() if key.startswith(last)}
    shapes |= {f"{norm}.weight": (width,) for norm in kind.norms} | {f"{kind.projection}.weight": (width, 2 * width)}
    source = torch.Generator().manual_seed(7)
    for layer in range(count):
        prefix = kind.prefix.replace("3", str(3 + layer)).replace("layers.0", f"layers.{layer}")
        for key, shape in shapes.items():
            noise = torch.randn(shape, generator=source)
            is_norm = key.endswith("norm.weight") or key.removesuffix(".weight") in kind.norms
            weights[prefix + key] = 0.2 * noise if not is_norm else 1.0 - kind.norm_offset + 0.3 * noise
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
    return folder


def _save(folder, config):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(folder)


class Reference:
    """Target and MTP layer in transformers' modules, without a cache: every row is computed anew."""

    def __init__(self, folder, name):
        self.kind = kind = KINDS[name]
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        self.decoder = self.model.eval().requires_grad_(False).model
        stored = load_file(folder / "model.safetensors")
        own = {key.removeprefix(kind.prefix): w for key, w in stored.items() if key.startswith(kind.prefix)}
        self.norms = [own[f"{norm}.weight"] + kind.norm_offset for norm in kind.norms]
        self.projection = own[f"{kind.projection}.weight"]
        outer = {f"{part}.weight" for part in (*kind.norms, kind.projection)}
        block = {key.removeprefix(kind.block): w for key, w in own.items() if key not in outer}
        self.block = copy.deepcopy(self.decoder.layers[-1])
        self.block.load_state_dict(_stacked({k: w + kind.norm_offset * ("norm" in k) for k, w in block.items()}))

    def norm(self, which, x):
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.norms[which]

    def target_states(self, token_ids):
        """[n] -> [n, hidden_size]: what the layer takes from the target."""
        kept = []
        hook = self.decoder.norm.register_forward_hook(lambda _, args, output: kept.append((args[0], output)))
        self.decoder(input_ids=torch.tensor([token_ids]), use_cache=False)
        hook.remove()
        return kept[0][1 if self.kind.takes_normed else 0][0]

    def outputs(self, token_ids, states):
        """[T] tokens, each with the state of the token before it, from position 0 on -> [T, hidden_size]"""
        count, kind = len(token_ids), self.kind
        embedded = self.decoder.embed_tokens(torch.tensor(token_ids))
        if kind.zeroes_first:
            embedded[0] = 0
        parts = [self.norm(0, embedded), self.norm(1, states)]
        hidden = torch.cat(parts if kind.embedding_first else parts[::-1], dim=-1) @ self.projection.T
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        rotation = self.decoder.rotary_emb(hidden[None], positions)
        out = self.block(hidden[None], attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        return (out if isinstance(out, torch.Tensor) else out[0])[0]

    def logits(self, outputs):
        return self.norm(2, outputs) @ self.model.lm_head.weight.T

    def next_states(self, outputs):
        return self.norm(2, outputs) if self.kind.recycles_normed else outputs

    def draft(self, token_ids, num_tokens):
        """The likeliest tokens after a text, one by one."""
        states = self.target_states(token_ids)[:-1]
        drafted = list(token_ids)
        for _ in range(num_tokens):
            last = self.outputs(drafted[1:], states)[-1:]
            drafted.append(int(self.logits(last).argmax()))
            states = torch.cat([states, self.next_states(last)])
        return tuple(drafted[len(token_ids) :])


def _stacked(weights):
    """Experts' projections as one tensor each, as transformers' modules have them."""
    count = 1 + max((int(key.split(".")[2]) for key in weights if key.startswith("mlp.experts.")), default=-1)
    if not count:
        return weights
    stacked = {key: weight for key, weight in weights.items() if not key.startswith("mlp.experts.")}
    gates, ups, downs = (
        torch.stack([weights[f"mlp.experts.{i}.{name}_proj.weight"] for i in range(count)])
        for name in ("gate", "up", "down")
    )
    return stacked | {"mlp.experts.gate_up_proj": torch.cat([gates, ups], dim=1), "mlp.experts.down_proj": downs}
