"""MTP layers of each layout against their formulas, on random weights."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.errors import ConfigError, ModelError
from forerun.kv.cache import KVCache
from forerun.models.base import LoadedTarget, choose_attention
from forerun.models.heads.mtp import load_mtp
from forerun.models.loader import load_model
from forerun.models.packing import Packing
from tests.heads_mtp import KINDS, Reference, add_mtp_layers, save_mtp_target
from tests.native import KERNELS, needs_kernels
from tests.tiny_models import save_tiny_model

CPU = torch.device("cpu")
TOKENS = torch.randint(97, [13], generator=torch.Generator().manual_seed(3)).tolist()


def load_target(folder, *, dtype=torch.float32, kernels=None):
    packing = Packing.choose(kernels, dtype=dtype) if kernels else None
    model = load_model(folder, dtype=dtype, device=CPU, packing=packing)
    return LoadedTarget(model=model, tokenizer=None, eos_token_ids=frozenset(), path=folder, kernels=kernels)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_mtp_target(tmp_path_factory.mktemp(name), name) for name in KINDS}


@pytest.fixture(scope="module")
def references(folders):
    return {name: Reference(folder, name) for name, folder in folders.items()}


def run(head, token_ids, states, *, bounds, kernels=None):
    """Outputs of rows from position 0 on, computed in chunks over a paged cache."""
    cache = KVCache(head.kv_specs, num_blocks=8, block_size=4, dtype=head.dtype, device=CPU)
    outputs = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        positions = torch.arange(start, end)
        blocks = np.arange(8, dtype=np.int32)
        batch = ForwardBatch(
            token_ids=torch.tensor(token_ids[start:end]),
            positions=positions,
            slot_mapping=positions,
            sequences=[SequenceRows(num_context=start, num_rows=end - start, block_ids=blocks)],
            block_size=4,
            logits_rows=positions,
        )
        attend = choose_attention(head.kv_specs, kernels).begin(batch, cache)
        outputs.append(head.forward(batch.token_ids, head.fuse([states[start:end]]), positions, attend))
    return torch.cat(outputs)


@torch.inference_mode()
@pytest.mark.parametrize("bounds", [[0, 12], [0, 5, 6, 7, 12]], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", KINDS)
def test_outputs_logits_and_states_equal_the_formulas(folders, references, name, bounds):
    head, reference = load_mtp(load_target(folders[name])), references[name]
    states = reference.target_states(TOKENS)[:-1]
    found, expected = run(head, TOKENS[1:], states, bounds=bounds), reference.outputs(TOKENS[1:], states)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(head.logits(found), reference.logits(expected), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(head.states(found), reference.next_states(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_it_needs_the_state_that_the_layer_was_trained_with(folders, name):
    head = load_mtp(load_target(folders[name]))
    assert head.needs == (("hidden.3",) if name == "mimo" else ("last_hidden",))


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3"])
def test_on_the_kernels_it_computes_the_same(folders, references, name):
    kernels = next(iter(KERNELS.values()))
    head, reference = load_mtp(load_target(folders[name], kernels=kernels)), references[name]
    states = reference.target_states(TOKENS)[:-1]
    found, expected = (
        run(head, TOKENS[1:], states, bounds=[0, 12], kernels=kernels),
        reference.outputs(TOKENS[1:], states),
    )
    torch.testing.assert_close(head.logits(found), reference.logits(expected), atol=1e-3, rtol=1e-3)


@needs_kernels
@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_in_bf16_it_computes_nearly_the_same(folders, references, name):
    kernels = next(iter(KERNELS.values()))
    head = load_mtp(load_target(folders[name], dtype=torch.bfloat16, kernels=kernels))
    states = references[name].target_states(TOKENS)[:-1]
    found = head.logits(run(head, TOKENS[1:], states, bounds=[0, 12], kernels=kernels))
    expected = references[name].logits(references[name].outputs(TOKENS[1:], states))
    assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).median() < 0.05


def test_embedding_and_head_are_the_targets_or_its_own(folders, tmp_path):
    folder = save_mtp_target(tmp_path, "llama")
    target = load_target(folder)
    assert load_mtp(target)._embed == target.model.embed
    assert load_mtp(target)._head == target.model.logits
    same = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    change(
        folder, lambda w: w.update({f"model.layers.3.{a}.weight": w[f"{b}.weight"].clone() for a, b in same.items()})
    )
    assert load_mtp(target)._embed == target.model.embed
    assert load_mtp(target)._head == target.model.logits
    change(folder, lambda w: w["model.layers.3.shared_head.head.weight"].neg_())
    states = torch.ones(2, 48)
    torch.testing.assert_close(load_mtp(target).logits(states), -load_mtp(load_target(folders["llama"])).logits(states))


def test_of_several_layers_the_first_is_used_and_a_warning_says_so(tmp_path, caplog):
    folder = add_mtp_layers(save_mtp_target(tmp_path, "llama"), "llama", 3)
    with caplog.at_level(logging.WARNING):
        load_mtp(load_target(folder))
    assert "has 3 MTP layers; the first drafts all tokens, the other 2 are not used" in caplog.text


def test_of_several_layers_in_qwens_layout_too(tmp_path, caplog):
    load_mtp(load_target(add_mtp_layers(save_mtp_target(tmp_path, "qwen3"), "qwen3", 2)))
    assert "has 2 MTP layers; the first drafts all tokens, the other 1 are not used" in caplog.text


# --- the target beside its MTP layers ---------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_the_target_loads_beside_layers_that_its_configuration_names_only(tmp_path, name):
    folder = save_mtp_target(tmp_path, name)
    load_target(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match=r"surplus tensor|unknown tensor"):
        load_target(folder)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_layer_beyond_those_named_is_refused(tmp_path, name):
    folder = save_mtp_target(tmp_path, name)
    change(folder, lambda w: w.update({"model.layers.4.enorm.weight": torch.ones(48)}))
    with pytest.raises(ModelError, match=r"model\.layers\.4\.enorm\.weight"):
        load_target(folder)


# --- bad input --------------------------------------------------------------------------------------


def change(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


SPOILT = {
    "missing part": ("hnorm.weight", None, "hnorm.weight' is missing"),
    "missing in the block": ("self_attn.o_proj.weight", None, "o_proj.weight'"),
    "surplus": ("self_attn.nonsense", torch.ones(1), "self_attn.nonsense'"),
    "shape of a part": ("eh_proj.weight", torch.ones(48, 48), r"has shape \[48, 48\], expected \[48, 96\]"),
    "shape in the block": ("input_layernorm.weight", torch.ones(3), "MTP layer"),
    "vocabulary of its head": ("shared_head.head.weight", torch.ones(96, 48), r"expected \[97, 48\]"),
}


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_damaged_layer_is_refused_by_one_line(tmp_path, name, spoilt):
    folder, (key, tensor, message) = save_mtp_target(tmp_path, name), SPOILT[spoilt]
    target = load_target(folder)

    def spoil(weights):
        weights.pop(f"model.layers.3.{key}", None)
        weights.update({} if tensor is None else {f"model.layers.3.{key}": tensor})

    change(folder, spoil)
    with pytest.raises(ModelError, match=message) as error:
        load_mtp(target)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_expert_that_is_missing_is_refused(tmp_path):
    folder = save_mtp_target(tmp_path, "deepseek_v3")
    target = load_target(folder)
    change(folder, lambda w: [w.pop(f"model.layers.3.mlp.experts.3.{x}_proj.weight") for x in ("gate", "up", "down")])
    with pytest.raises(ModelError, match=r"MTP layer.*transformers cannot load it"):
        load_mtp(target)


def test_a_target_without_such_layers_is_refused(tmp_path):
    target = load_target(save_tiny_model(tmp_path, vocab_size=97))
    with pytest.raises(ModelError, match=r"needs multi-token prediction layers.*\(config.json names 0\)"):
        load_mtp(target)


def test_qwens_names_under_another_architecture_are_none_that_are_known(tmp_path):
    folder = save_tiny_model(tmp_path, vocab_size=97)
    target = load_target(add_mtp_layers(folder, "qwen3"))
    with pytest.raises(ModelError, match=r"have none of a known layout \(config.json names 1\)"):
        load_mtp(target)


def test_a_target_made_in_memory_is_refused(folders):
    with pytest.raises(ConfigError, match="reads the target's files; it has none"):
        load_mtp(replace(load_target(folders["llama"]), path=None))


def test_a_gguf_target_is_refused(folders, tmp_path):
    gguf = tmp_path / "tiny.gguf"
    gguf.touch()
    with pytest.raises(ConfigError, match="is GGUF, which is read without MTP layers"):
        load_mtp(replace(load_target(folders["llama"]), path=gguf))
