"""Tiny random DFlash heads in the published layouts, and their formulas written out plainly."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM = 48, 64, 4, 2, 16
TARGET_LAYERS, EPS = 3, 1e-6
MASK_TOKEN = 3
BLOCK_SIZE = 8
WINDOW = 9
MASK_FILE = "mask_embedding.pt"


def dflash_config(*, vocab_size, num_layers=2, **changes):
    """config.json as the authors write it; `changes` go to its top."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "rope_theta": 5000.0,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "attention_bias": False,
        "block_size": BLOCK_SIZE,
        "num_target_layers": TARGET_LAYERS,
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 1]},
        **changes,
    }


def speculators_config(*, vocab_size, draft_vocab_size, **changes):
    """The same as speculators writes it."""
    content = dflash_config(vocab_size=vocab_size)
    nested = {
        key: value for key, value in content.items() if key not in ("architectures", "block_size", "dflash_config")
    }
    del nested["num_target_layers"]
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": nested,
        "draft_vocab_size": draft_vocab_size,
        "block_size": BLOCK_SIZE,
        "aux_hidden_state_layer_ids": [1, 2],
        "mask_token_id": MASK_TOKEN,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        **changes,
    }


def dflash_weights(*, seed=0, num_layers=2, num_features=2, bias=False):
    """Random tensors by their published names, large enough that every part matters."""
    source = torch.Generator().manual_seed(seed)

    def matrix(outputs, inputs):
        return torch.randn(outputs, inputs, generator=source) / inputs**0.5

    def norm(width):
        return 1 + 0.3 * torch.randn(width, generator=source)

    weights = {
        "fc.weight": matrix(WIDTH, num_features * WIDTH),
        "hidden_norm.weight": norm(WIDTH),
        "norm.weight": norm(WIDTH),
    }
    for i in range(num_layers):
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        for kind, count in rows.items():
            weights[f"layers.{i}.self_attn.{kind}_proj.weight"] = matrix(count, WIDTH)
        weights[f"layers.{i}.self_attn.o_proj.weight"] = matrix(WIDTH, HEADS * HEAD_DIM)
        if bias:
            for kind, count in {**rows, "o": WIDTH}.items():
                weights[f"layers.{i}.self_attn.{kind}_proj.bias"] = 0.3 * torch.randn(count, generator=source)
        weights[f"layers.{i}.self_attn.q_norm.weight"] = 2 * norm(HEAD_DIM)
        weights[f"layers.{i}.self_attn.k_norm.weight"] = 2 * norm(HEAD_DIM)
        weights[f"layers.{i}.mlp.gate_proj.weight"] = matrix(INNER, WIDTH)
        weights[f"layers.{i}.mlp.up_proj.weight"] = matrix(INNER, WIDTH)
        weights[f"layers.{i}.mlp.down_proj.weight"] = matrix(WIDTH, INNER)
        weights[f"layers.{i}.input_layernorm.weight"] = norm(WIDTH)
        weights[f"layers.{i}.post_attention_layernorm.weight"] = norm(WIDTH)
    return weights


def save_dflash(folder, content, weights, *, mask=None):
    """Write a checkpoint; `mask` beside it, if the mask has an embedding of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(weights, folder / "model.safetensors")
    if mask is not None:
        torch.save(mask, folder / MASK_FILE)
    return folder


@functools.cache
def tiny_dflash(vocab_size):
    """A folder with a head for the tiny targets, one of its layers with a window."""
    windows = {
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    }
    folder = Path(_scratch().name) / str(vocab_size)
    return save_dflash(folder, dflash_config(vocab_size=vocab_size, **windows), dflash_weights())


@functools.cache
def _scratch():
    """Files of this test process."""
    return tempfile.TemporaryDirectory()


def plain_logits(weights, *, features, block, embed, head, theta=5000.0, windows=None, causal=None, neox=True):
    """DFlash's logits [len(block), V] from the formulas, one dense pass over the whole text.

    `features` [T, n * WIDTH] are those of all places before the block; `block` are its token embeddings'
    ids, looked up by `embed`; `head` maps normed rows to logits.
    """
    num_layers = sum(name.endswith("q_norm.weight") for name in weights)
    windows, causal = windows or [None] * num_layers, causal or [False] * num_layers
    num_context, num_rows = len(features), len(block)
    positions = torch.arange(num_context + num_rows)
    fused = _norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    hidden = embed(block)
    for i in range(num_layers):
        own = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        normed = _norm(hidden, own["input_layernorm.weight"])
        seen = torch.cat([fused, normed])
        query = _norm(_heads(_linear(normed, own, "q")), own["self_attn.q_norm.weight"])
        key = _norm(_heads(_linear(seen, own, "k")), own["self_attn.k_norm.weight"])
        value = _heads(_linear(seen, own, "v"))
        query = _rotated(query, positions[num_context:], theta, neox=neox)
        key = _rotated(key, positions, theta, neox=neox)
        mask = torch.ones(num_rows, num_context + num_rows, dtype=torch.bool)
        distance = positions[num_context:, None] - positions[None]
        if causal[i]:
            mask &= distance >= 0
        if windows[i]:
            mask &= distance < windows[i]
        scores = torch.einsum("rhd,khd->hrk", query, key.repeat_interleave(HEADS // KV_HEADS, 1)) * HEAD_DIM**-0.5
        shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        attended = torch.einsum("hrk,khd->rhd", shares, value.repeat_interleave(HEADS // KV_HEADS, 1))
        hidden = hidden + _linear(attended.flatten(1), own, "o")
        normed = _norm(hidden, own["post_attention_layernorm.weight"])
        gated = F.silu(normed @ own["mlp.gate_proj.weight"].T) * (normed @ own["mlp.up_proj.weight"].T)
        hidden = hidden + gated @ own["mlp.down_proj.weight"].T
    return head(_norm(hidden, weights["norm.weight"]))


def _norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _linear(x, own, kind):
    bias = own.get(f"self_attn.{kind}_proj.bias", 0)
    return x @ own[f"self_attn.{kind}_proj.weight"].T + bias


def _heads(x):
    return x.unflatten(-1, (-1, HEAD_DIM))


def _rotated(x, positions, theta, *, neox):
    """Each pair of dimensions as a complex number, turned."""
    half = HEAD_DIM // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    pairs = x.unflatten(-1, (2, half)).transpose(-1, -2) if neox else x.unflatten(-1, (half, 2))
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.view_as_real(turned)
    return (turned.transpose(-1, -2) if neox else turned).flatten(-2)
