"""A head in SpecForge's layout computes by SpecForge's names what it does here: its module is written out, apart from any reader."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from forerun.models.heads.eagle3 import MASK
from forerun.train.packaging import save_head
from forerun.train.served_head import served_logits
from tests.native import needs_kernels
from tests.train.target_folder import chat_model, chat_model_folder
from tests.train.test_eagle3_trainer import learned, trainer

MATRICES = [
    *("fc", "lm_head"),
    *(f"midlayer.self_attn.{name}_proj" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")),
]
NORMS = ["norm", *(f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))]


def written_out(config, tensors, embeddings, features):
    """The logits [S, V] of SpecForge's LlamaForCausalLMEagle3, by its names: embeddings [S, width], features [S, 3 * width]."""
    heads, kv_heads, dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    length = len(embeddings)

    def weight(name):
        return tensors[f"{name}.weight"].float()

    def norm(name, rows):
        return weight(name) * rows * (rows.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt()

    def rotated(rows):
        angles = torch.arange(length)[:, None] * config["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))
        left, right = rows.chunk(2, dim=-1)
        return rows * cos + torch.cat([-right, left], -1) * sin

    state = features @ weight("fc").T
    read = torch.cat([norm("midlayer.input_layernorm", embeddings), norm("midlayer.hidden_norm", state)], -1)
    query, key, value = (
        (read @ weight(f"midlayer.self_attn.{name}_proj").T).view(length, -1, dim) for name in ("q", "k", "v")
    )
    key, value = (rows.repeat_interleave(heads // kv_heads, dim=1) for rows in (rotated(key), value))
    scores = torch.einsum("qhd,khd->hqk", rotated(query), key) / dim**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
    state = state + attended @ weight("midlayer.self_attn.o_proj").T
    rows = norm("midlayer.post_attention_layernorm", state)
    gate, up = (rows @ weight(f"midlayer.mlp.{name}_proj").T for name in ("gate", "up"))
    state = state + (F.silu(gate) * up) @ weight("midlayer.mlp.down_proj").T
    return norm("norm", state) @ weight("lm_head").T


@needs_kernels
def test_its_own_names_give_the_same_logits(tmp_path):
    training = trainer()
    for _ in range(3):
        training.run_step()
    save_head(tmp_path, training.content, training.tensors(), layout="specforge", target=chat_model_folder())
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert set(tensors) == {*(f"{name}.weight" for name in (*MATRICES, *NORMS)), "d2t", "t2d", MASK}
    drafted = tensors["d2t"] + torch.arange(config["draft_vocab_size"])
    assert tensors["t2d"].nonzero()[:, 0].equal(drafted)
    (text,) = learned(1)
    observed = training.observe([text])
    features = torch.cat(
        [observed.features[f"hidden.{n}"][0, :-1] for n in config["eagle_aux_hidden_state_layer_ids"]], -1
    )
    embeddings = chat_model().model.embed(observed.token_ids[0, 1:])
    expected = written_out(config, tensors, embeddings.float(), features.float())[observed.places - 1].softmax(-1)
    found = served_logits(tmp_path, chat_model(), observed).softmax(-1)
    assert ((found - expected).abs().sum(-1) / 2).max() < 0.01
    assert not torch.allclose(expected[0], expected[1], atol=0.01)
