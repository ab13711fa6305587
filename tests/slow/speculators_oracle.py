"""Makes heads with the speculators library, and what it computes with them; runs in that library's own environment.

python speculators_oracle.py FOLDER KIND OPTIONS: writes a checkpoint as the library saves it, and oracle.safetensors
beside it: what went in (tokens, features) and the logits that came out. OPTIONS is JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash import core as dflash_core
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle import core as peagle_core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

NUM_TOKENS = 24
SIZES = {
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}


def layers(config_class, target, *, num_layers):
    """The configuration of a head's layers."""
    vocab_size, width = target["embedding"].shape
    return config_class(vocab_size=vocab_size, hidden_size=width, num_hidden_layers=num_layers, **SIZES)


def described(kind, num_tokens):
    """What each checkpoint says of itself."""
    return SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num_tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def filled(model, target):
    """The same with random weights, norms among them, and the target's embedding and head."""
    source = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=source)
        weight.data = 1 + 0.2 * noise if "norm" in name else 0.2 * noise
    model.embed_tokens.weight.data = target["embedding"]
    vocab_size, num_draft = len(target["embedding"]), model.draft_vocab_size
    if num_draft < vocab_size:
        ids = torch.randperm(vocab_size, generator=source)[:num_draft].sort().values
        drafted = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, value=True)
        model.load_vocab_mappings(drafted, ids - torch.arange(num_draft))
    else:
        model.lm_head.weight.data = target["head"]
    return model.eval()


def watch_logits(model):
    """A list that each call of the head adds its logits [rows, V] to."""
    seen = []
    model.lm_head.register_forward_hook(lambda _module, _given, logits: seen.append(logits[0].detach()))
    return seen


def given(target, num_features):
    """A text's tokens [T] and features [T, all of them side by side]."""
    source = torch.Generator().manual_seed(1)
    vocab_size, width = target["embedding"].shape
    tokens = torch.randint(vocab_size, (NUM_TOKENS,), generator=source)
    return tokens, 2 * torch.randn(NUM_TOKENS, num_features * width, generator=source)


def trained_on(tokens, features, width):
    """What the library's training step takes of a text."""
    return {
        "hidden_states": features[None],
        "input_ids": tokens[None],
        "document_ids": torch.zeros(1, NUM_TOKENS, dtype=torch.long),
        "loss_mask": torch.ones(1, NUM_TOKENS),
        "verifier_last_hidden_states": torch.zeros(1, NUM_TOKENS, width),
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }


def eagle3(target, *, num_layers=1, num_draft=40, num_aux=3, **flags):
    """EAGLE-3: each row's logits, then those after the row's next tokens, one and two further."""
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers(LlamaConfig, target, num_layers=num_layers),
        speculators_config=described("eagle3", 4),
        draft_vocab_size=num_draft,
        eagle_aux_hidden_state_layer_ids=list(range(num_aux)),
        **{"norm_before_residual": False, **flags},
    )
    model = filled(Eagle3DraftModel(config), target)
    seen, (tokens, features) = watch_logits(model), given(target, num_aux)
    model(features[None], tokens[None], torch.zeros(1, NUM_TOKENS, dtype=torch.long), ttt_steps=3)
    return model, {"tokens": tokens, "features": features, "logits": torch.stack(seen)}


def peagle(target, *, num_layers=2, num_draft=40, depths=4, **flags):
    """P-EAGLE: the logits of each row and of the masks after it; `anchors` and `depths` say which."""
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layers(LlamaConfig, target, num_layers=num_layers),
        speculators_config=described("peagle", depths),
        draft_vocab_size=num_draft,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        mask_token_id=7,
        **{"norm_before_residual": False, **flags},
    )
    model = filled(PEagleDraftModel(config), target)
    seen, (tokens, features), sampled = watch_logits(model), given(target, 3), []
    draw = peagle_core.generate_cod_sample_indices
    peagle_core.generate_cod_sample_indices = lambda **options: sampled.append(draw(**options)) or sampled[-1]
    model(**trained_on(tokens, features, model.hidden_size), num_depths=depths, down_sample_ratio=1.0)
    ((anchors, depth),) = sampled
    return model, {"tokens": tokens, "features": features, "logits": seen[0], "anchors": anchors, "depths": depth}


def dflash(target, *, num_layers=2, num_draft=None, block_size=6, **flags):
    """DFlash: the logits of a block after each of some places, which `anchors` are."""
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers(Qwen3Config, target, num_layers=num_layers),
        speculators_config=described("dflash", block_size - 1),
        draft_vocab_size=num_draft or len(target["embedding"]),
        block_size=block_size,
        aux_hidden_state_layer_ids=[0, 2],
        mask_token_id=3,
        **flags,
    )
    model = filled(DFlashDraftModel(config), target)
    seen, (tokens, features), chosen = watch_logits(model), given(target, 2), []
    choose = dflash_core.select_anchors
    dflash_core.select_anchors = lambda *options: chosen.append(choose(*options)) or chosen[-1]
    model(**trained_on(tokens, features, model.hidden_size), max_anchors=5)
    ((anchors, _),) = chosen
    logits = seen[0].view(len(anchors), block_size, -1)
    return model, {"tokens": tokens, "features": features, "logits": logits, "anchors": anchors}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with torch.no_grad():
        model, record = globals()[sys.argv[2]](load_file(folder / "target.safetensors"), **json.loads(sys.argv[3]))
    model.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in record.items()}, folder / "oracle.safetensors")
