"""Tiny random Medusa heads and MLP speculators in the layouts they are published in."""

from __future__ import annotations

import torch

from tests.heads_eagle import Tensors, draft_ids


def medusa(target, *, seed=0, num_heads=4, num_blocks=1, bias=True, vocabularies="target", num_draft=None):
    """(config, tensors) for a target, in the authors' layout or, with a token map, in vLLM's.

    `vocabularies`: "target" stores none, "own" one for each head, "common" one for all. `num_draft` tokens
    stand in the token map, in no order.
    """
    width, vocab_size = target.model.hidden_size, target.model.vocab_size
    tensors = Tensors(seed)
    for head in range(num_heads):
        for block in range(num_blocks):
            tensors.add(f"{head}.{block}.linear.weight", width, width)
            if bias:
                tensors.add(f"{head}.{block}.linear.bias", width)
        if vocabularies == "own" or (vocabularies == "common" and head == 0):
            tensors.add(f"{head}.{num_blocks}.weight", vocab_size, width)
    config = {"medusa_num_heads": 2, "medusa_num_layers": num_blocks, "base_model_name_or_path": "tiny"}
    if vocabularies == "common":
        config["original_lm_head"] = True
    if num_draft:
        tensors["token_map"] = draft_ids(vocab_size, num_draft).flip(0)
        config["truncated_vocab_size"] = num_draft
    return config, tensors


def mlp_speculator(target, *, seed=0, num_steps=4, inner_dim=40, tie_weights=False, scale_input=False):
    """(config, tensors) for a target; tied weights are stored once."""
    width, vocab_size = target.model.hidden_size, target.model.vocab_size
    inner = inner_dim or width
    tensors = Tensors(seed)
    for step in range(num_steps):
        if step < (2 if tie_weights else num_steps):
            tensors.add(f"proj.{step}.weight", inner, inner if step else width)
        if step < (1 if tie_weights else num_steps):
            tensors.add(f"emb.{step}.weight", vocab_size, inner)
            tensors.add(f"head.{step}.weight", vocab_size, inner)
            tensors.add_norm(f"ln.{step}", inner)
            tensors.add(f"ln.{step}.bias", inner)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": width,
        "inner_dim": inner_dim,
        "n_predict": num_steps,
        "vocab_size": vocab_size,
        "tie_weights": tie_weights,
        "scale_input": scale_input,
    }
    return config, tensors


def vllm_names(tensors):
    """The authors' Medusa tensors under vLLM's names."""

    def rename(name):
        head, *rest = name.split(".")
        if not head.isdigit():
            return name
        return f"blocks.{head}.layers.{rest[0]}.{rest[2]}" if "linear" in rest else f"lm_heads.{head}.weight"

    return {rename(name): tensor for name, tensor in tensors.items()}


def cut_vocabularies(tensors):
    """The same with only those rows of each vocabulary that the token map names."""
    ids = tensors["token_map"]
    return {
        name: tensor[ids] if "linear" not in name and name != "token_map" else tensor
        for name, tensor in tensors.items()
    }


def tie_blocks(tensors, num_blocks):
    """All blocks of a head like its first; `stored` once as safetensors may leave them, and written out."""
    stored = {name: tensor for name, tensor in tensors.items() if name.split(".")[1] in ("0", str(num_blocks))}
    written = dict(stored)
    for name, tensor in stored.items():
        head, block, *rest = name.split(".")
        if block == "0":
            for other in range(1, num_blocks):
                written[".".join([head, str(other), *rest])] = tensor
    return stored, written


def dense_medusa(config, tensors, hidden, *, head):
    """What the formulas say: [R, width] -> logits [R, V] of each Medusa head; -inf where a token cannot be drafted.

    `head` [V, width] is the target's.
    """
    all_logits = []
    num_heads = 1 + max(int(name.split(".")[0]) for name in tensors if name[0].isdigit())
    num_blocks = config["medusa_num_layers"]
    for index in range(num_heads):
        x = hidden
        for block in range(num_blocks):
            name = f"{index}.{block}.linear"
            y = x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)
            x = x + y * torch.sigmoid(y)
        own = tensors.get(f"{0 if config.get('original_lm_head') else index}.{num_blocks}.weight", head)
        logits = x @ own.T
        if "token_map" in tensors:
            kept = torch.full_like(logits, -torch.inf)
            kept[:, tensors["token_map"]] = logits[:, tensors["token_map"]]
            logits = kept
        all_logits.append(logits)
    return all_logits


def dense_mlp(config, tensors, hidden, token_ids):
    """What the formulas say: [width] and the tokens from the last committed one on -> logits [V] after the last of them."""
    num_steps, inner = config["n_predict"], config["inner_dim"] or config["emb_dim"]

    def part(name, step, tied_to=0):
        return tensors[name.format(min(step, tied_to) if config["tie_weights"] else step)]

    def norm(x):
        return x / (x.pow(2).mean() + 1e-6).sqrt()

    state = norm(hidden) / 2**0.5 if config["scale_input"] else hidden
    state_weight = 0.5 ** (0.5 / num_steps)
    token_weight = ((1 - state_weight**2) * inner / 2) ** 0.5
    for step, token in enumerate(token_ids):
        z = part("emb.{}.weight", step)[token]
        x = part("proj.{}.weight", step, tied_to=1) @ state + token_weight / state_weight * z
        x = norm(x) * part("ln.{}.weight", step) + part("ln.{}.bias", step)
        state = 0.5 * x * (1 + torch.erf(x / 2**0.5))
    return part("head.{}.weight", len(token_ids) - 1) @ state
