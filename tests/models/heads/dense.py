"""Heads written out as formulas over whole texts, without cache or batches: the oracle for those that serve."""

from __future__ import annotations

import torch

from tests.heads_eagle import HEAD_DIM, LAYER


def rms(x, weight, eps=1e-5):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate(x, positions, theta=10000.0):
    """[T, heads, dim]: dimension i turns with i + dim / 2."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def attention(weights, prefix, x, positions, *, theta=10000.0):
    """Causal attention of all rows [T, inputs] among themselves."""
    heads, kv_heads = LAYER["num_attention_heads"], LAYER["num_key_value_heads"]
    query, key, value = (x @ weights[f"{prefix}{name}_proj.weight"].T for name in "qkv")
    query = rotate(query.view(-1, heads, HEAD_DIM), positions, theta)
    key = rotate(key.view(-1, kv_heads, HEAD_DIM), positions, theta)
    key, value = (t.view(-1, kv_heads, HEAD_DIM).repeat_interleave(heads // kv_heads, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * HEAD_DIM**-0.5
    hidden = torch.ones(len(x), len(x)).triu(1).bool()
    attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
    return attended.flatten(1) @ weights[f"{prefix}o_proj.weight"].T


def mlp(weights, prefix, x):
    gate, up = (x @ weights[f"{prefix}{name}_proj.weight"].T for name in ("gate", "up"))
    return (torch.nn.functional.silu(gate) * up) @ weights[f"{prefix}down_proj.weight"].T


def llama_layer(weights, prefix, x, positions, *, has_input_norm=True):
    normed = rms(x, weights[f"{prefix}input_layernorm.weight"]) if has_input_norm else x
    x = x + attention(weights, f"{prefix}self_attn.", normed, positions)
    return x + mlp(weights, f"{prefix}mlp.", rms(x, weights[f"{prefix}post_attention_layernorm.weight"]))


class DenseEagle:
    """EAGLE-1: x = fc([e; h]) -> layers; the target's head on what comes out, which is the next state too."""

    def __init__(self, config, weights, *, embed, head):
        self.config, self.weights, self.embed, self.head = config, weights, embed, head

    def fuse(self, features):
        return features["last_hidden"]

    def outputs(self, token_ids, states):
        """[T], [T, width] of the positions from 0 on -> [T, width]"""
        x = torch.cat([self.embed[token_ids], states], dim=-1) @ self.weights["fc.weight"].T
        x = x + self.weights.get("fc.bias", torch.zeros(x.shape[1]))
        positions = torch.arange(len(x))
        for index in range(self.config["num_hidden_layers"]):
            x = llama_layer(self.weights, f"layers.{index}.", x, positions, has_input_norm=index > 0)
        return x

    def states(self, outputs):
        return outputs

    def logits(self, outputs):
        return outputs @ self.head.T


class DenseEagle3:
    """EAGLE-3: a = [norm(e); norm(g)], y = g + attention(a), y + mlp(norm(y)); head(norm(y)); y is the next state."""

    def __init__(self, config, weights, *, embed):
        self.config, self.weights = config, weights
        self.embed = weights.get("embed_tokens.weight", embed)

    def fuse(self, features):
        parts = [features[f"hidden.{i}"] for i in sorted(self.config["eagle_aux_hidden_state_layer_ids"])]
        if self.config.get("fc_norm"):
            parts = [rms(part, self.weights[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        x = torch.cat(parts, dim=-1)
        if self.config.get("norm_before_fc"):
            x = rms(x, self.weights["input_norm.weight"])
        return x @ self.weights["fc.weight"].T

    def outputs(self, token_ids, states):
        """[T], [T, width] of the positions from 0 on -> [T, width]"""
        weights, positions = self.weights, torch.arange(len(token_ids))
        normed = rms(states, weights["midlayer.hidden_norm.weight"])
        embedded = rms(self.embed[token_ids], weights["midlayer.input_layernorm.weight"])
        residual = normed if self.config.get("norm_before_residual") else states
        x = torch.cat([embedded, normed], dim=-1)
        y = residual + attention(weights, "midlayer.self_attn.", x, positions)
        y = y + mlp(weights, "midlayer.mlp.", rms(y, weights["midlayer.post_attention_layernorm.weight"]))
        for index in range(1, self.config["num_hidden_layers"]):
            y = llama_layer(weights, f"layers.{index}.", y, positions)
        return y

    def states(self, outputs):
        return rms(outputs, self.weights["norm.weight"]) if self.config.get("norm_output") else outputs

    def logits(self, outputs):
        """Over the target's vocabulary; -inf where a token cannot be drafted."""
        drafted = rms(outputs, self.weights["norm.weight"]) @ self.weights["lm_head.weight"].T
        if "d2t" not in self.weights:
            return drafted
        wide = torch.full((len(drafted), self.config["vocab_size"]), -torch.inf)
        wide[:, torch.arange(drafted.shape[1]) + self.weights["d2t"]] = drafted
        return wide


def draft(dense, features, token_ids, count):
    """The chain that a head drafts after a whole text, everything computed anew for each token.

    `features[name]` are the target's at each token but the last, [T - 1, width].
    """
    states, tokens = dense.fuse(features), list(token_ids[1:])
    for _ in range(count):
        outputs = dense.outputs(torch.tensor(tokens), states)
        tokens.append(int(dense.logits(outputs[-1:]).argmax()))
        states = torch.cat([states, dense.states(outputs[-1:])])
    return tokens[-count:]


def parallel_logits(dense, features, token_ids, count):
    """P-EAGLE's logits [count, vocab_size] after a whole text: one pass over it and `count` - 1 masks."""
    names = [f"hidden.{i}" for i in sorted(dense.config["eagle_aux_hidden_state_layer_ids"])]
    parts = dense.weights["mask_hidden"].flatten().chunk(len(names))
    mask = dense.fuse({name: part[None] for name, part in zip(names, parts, strict=True)})
    states = torch.cat([dense.fuse(features), *[mask] * (count - 1)])
    tokens = [*token_ids[1:], *[dense.config["mask_token_id"]] * (count - 1)]
    return dense.logits(dense.outputs(torch.tensor(tokens), states)[-count:])
