"""Medusa heads and MLP speculators compute what their papers' formulas say, in every published layout."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from forerun.models.heads.medusa import load_medusa
from forerun.models.heads.mlp_speculator import load_mlp_speculator
from tests import heads_medusa
from tests.engines import native_target, tiny_target
from tests.heads_eagle import save
from tests.native import needs_kernels

TARGETS = [tiny_target, pytest.param(native_target, marks=needs_kernels)]


def hidden_of(target, rows=3):
    """Rows like those after a final norm, in what the target's dtype can hold."""
    hidden = torch.randn(rows, target.model.hidden_size, generator=torch.Generator().manual_seed(5))
    return hidden.to(target.model.dtype)


def rounded(target, tensors):
    """What is left of the weights in the target's dtype, as fp32."""
    return {
        name: tensor.to(target.model.dtype).float() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def assert_close(target, found, expected):
    """To rounding in the target's dtype."""
    exact = target.model.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5 if exact else 2e-2, atol=1e-4 if exact else 0.15)


def head_rows(target):
    """The target's vocabulary, [V, hidden_size]"""
    return target.model.head_rows(torch.arange(target.model.vocab_size)).float()


def assert_medusa(target, folder, config, tensors):
    """The heads in the folder against the formulas on the tensors, in the authors' layout."""
    heads = load_medusa(folder, target)
    hidden = hidden_of(target)
    expected = heads_medusa.dense_medusa(config, rounded(target, tensors), hidden.float(), head=head_rows(target))
    with torch.inference_mode():
        found = heads.logits(hidden, count=heads.num_heads)
    assert len(found) == len(expected) == 4
    for own, dense in zip(found, expected, strict=True):
        assert own.dtype == torch.float32
        if heads.target_ids is not None:
            dense = dense[:, heads.target_ids]
        assert_close(target, own, dense)
    return heads


@pytest.mark.parametrize("make_target", TARGETS)
@pytest.mark.parametrize("num_draft", [None, 40])
@pytest.mark.parametrize("vocabularies", ["target", "own", "common"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_medusa_heads_are_the_formulas(make_target, num_draft, vocabularies, bias, num_blocks, tmp_path):
    options = {"num_draft": num_draft, "vocabularies": vocabularies, "bias": bias, "num_blocks": num_blocks}
    config, tensors = heads_medusa.medusa(make_target(), **options)
    assert_medusa(make_target(), save(tmp_path, config, tensors), config, tensors)


@pytest.mark.parametrize("prefix", ["medusa_heads.", "medusa_head."])
def test_a_prefix_changes_nothing(prefix, tmp_path):
    config, tensors = heads_medusa.medusa(tiny_target())
    folder = save(tmp_path, config, {prefix + name: tensor for name, tensor in tensors.items()})
    assert_medusa(tiny_target(), folder, config, tensors)


@pytest.mark.parametrize("vocabularies", ["target", "own", "common"])
@pytest.mark.parametrize("num_draft", [None, 40])
def test_vllms_names_change_nothing(vocabularies, num_draft, tmp_path):
    config, tensors = heads_medusa.medusa(tiny_target(), vocabularies=vocabularies, num_draft=num_draft)
    assert_medusa(tiny_target(), save(tmp_path, config, heads_medusa.vllm_names(tensors)), config, tensors)


def test_vocabularies_may_be_stored_without_the_tokens_that_are_not_drafted(tmp_path):
    config, tensors = heads_medusa.medusa(tiny_target(), vocabularies="own", num_draft=40)
    assert_medusa(tiny_target(), save(tmp_path, config, heads_medusa.cut_vocabularies(tensors)), config, tensors)


@pytest.mark.parametrize("vocabularies", ["target", "own"])
def test_tied_blocks_may_be_stored_once(vocabularies, tmp_path):
    config, tensors = heads_medusa.medusa(tiny_target(), num_blocks=3, vocabularies=vocabularies)
    stored, written = heads_medusa.tie_blocks(tensors, 3)
    assert_medusa(tiny_target(), save(tmp_path, config, stored), config, written)


def test_the_authors_file_name_is_known(tmp_path):
    config, tensors = heads_medusa.medusa(tiny_target())
    (save(tmp_path, config, tensors) / "model.safetensors").rename(tmp_path / "medusa_lm_head.safetensors")
    assert_medusa(tiny_target(), tmp_path, config, tensors)


def test_copies_of_the_targets_vocabulary_are_not_kept(tmp_path):
    target = tiny_target()
    config, tensors = heads_medusa.medusa(target, vocabularies="own")
    copies = {name: head_rows(target).clone() for name in tensors if "linear" not in name}
    heads = assert_medusa(target, save(tmp_path, config, tensors | copies), config, tensors | copies)
    assert heads._vocabularies == [target.model.logits] * 4


def test_only_as_many_heads_as_asked_for_are_computed(tmp_path):
    heads = load_medusa(save(tmp_path, *heads_medusa.medusa(tiny_target())), tiny_target())
    assert len(heads.logits(hidden_of(tiny_target()), count=2)) == 2


# --- MLP speculator -------------------------------------------------------------------------------


def assert_mlp(target, folder, config, tensors):
    """Every step of the speculator in the folder against the formulas on the tensors."""
    speculator = load_mlp_speculator(folder, target)
    weights, hidden = rounded(target, tensors), hidden_of(target, rows=2)
    texts = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
    with torch.inference_mode():
        states = speculator.begin(hidden)
        for step in range(4):
            logits, states = speculator.step(step, texts[:, step], states)
            for row, text in enumerate(texts):
                expected = heads_medusa.dense_mlp(config, weights, hidden[row].float(), text[: step + 1])
                assert_close(target, logits[row], expected)
    return speculator


@pytest.mark.parametrize("make_target", TARGETS)
@pytest.mark.parametrize("inner_dim", [0, 40])
@pytest.mark.parametrize("tie_weights", [False, True])
@pytest.mark.parametrize("scale_input", [False, True])
def test_an_mlp_speculator_is_the_formulas(make_target, inner_dim, tie_weights, scale_input, tmp_path):
    options = {"inner_dim": inner_dim, "tie_weights": tie_weights, "scale_input": scale_input}
    config, tensors = heads_medusa.mlp_speculator(make_target(), **options)
    assert_mlp(make_target(), save(tmp_path, config, tensors), config, tensors)


def test_tied_weights_may_be_written_out_and_are_kept_once(tmp_path):
    config, tensors = heads_medusa.mlp_speculator(tiny_target(), tie_weights=True)
    kinds = {name: 1 if name.startswith("proj") else 0 for name in tensors}
    written = dict(tensors)
    for name, last in kinds.items():
        kind, step, rest = name.split(".")
        if int(step) == last:
            written |= {f"{kind}.{other}.{rest}": tensors[name].clone() for other in range(last + 1, 4)}
    save(tmp_path, config, {})
    save_file({f"speculator.{name}": tensor for name, tensor in written.items()}, tmp_path / "model.safetensors")
    speculator = assert_mlp(tiny_target(), tmp_path, config, tensors)
    for parts, distinct in ((speculator._embeddings, 1), (speculator._heads, 1), (speculator._projections, 2)):
        assert len({id(part) for part in parts}) == distinct
