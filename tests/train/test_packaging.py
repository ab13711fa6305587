"""A head loads from both layouts with the same weights, and its card says what was measured on the way."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from forerun.models.heads.eagle3 import load_eagle3
from forerun.train.copied_block import begin_from_block
from forerun.train.measuring import DRAFTING, Acceptance, Measurement
from forerun.train.packaging import LAYOUTS, fits_int8, model_card, save_head
from forerun.train.trained_head import begin_from_head
from tests.native import needs_kernels
from tests.train.target_folder import chat_model, chat_model_folder

DRAFT_IDS = torch.arange(0, 264, 2)


@needs_kernels
def test_both_layouts_load_as_the_same_head(tmp_path):
    content, tensors = begin_from_block(chat_model(), DRAFT_IDS, seed=0)
    features = torch.randn(4, 3 * content["hidden_size"], generator=torch.Generator().manual_seed(1))
    found = []
    for layout in LAYOUTS:
        save_head(tmp_path / layout, content, tensors, layout=layout, target=chat_model_folder())
        head = load_eagle3(tmp_path / layout, chat_model())
        assert head.target_ids.tolist() == DRAFT_IDS.tolist()
        found.append(head.logits(head.project(features)))
    assert torch.equal(*found)


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_in_int8_takes_fewer_bytes_and_is_rounded_once(tmp_path, layout):
    content, tensors = begin_from_block(chat_model(), DRAFT_IDS, seed=0)
    for folder, stored_as in (("whole", "bf16"), ("first", "int8")):
        save_head(tmp_path / folder, content, tensors, layout=layout, target=chat_model_folder(), stored_as=stored_as)
    sizes = [(tmp_path / folder / "model.safetensors").stat().st_size for folder in ("whole", "first")]
    assert sizes[1] < sizes[0]
    read_content, rounded = begin_from_head(tmp_path / "first", chat_model())
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            assert rounded[name].equal(tensor)
            continue
        step = tensor.abs().amax(-1, keepdim=True) / 127 if fits_int8(tensor) else tensor.abs() * 2**-7
        assert (rounded[name] - tensor).abs().le(0.51 * step).all(), name
    save_head(tmp_path / "again", read_content, rounded, layout=layout, target=chat_model_folder(), stored_as="int8")
    _, again = begin_from_head(tmp_path / "again", chat_model())
    assert all(torch.equal(rounded[name], tensor) for name, tensor in again.items())


@pytest.mark.parametrize("verifier", [None, "org/name"])
def test_the_layout_of_speculators_names_the_target_as_vllm_loads_it(tmp_path, verifier):
    content, tensors = begin_from_block(chat_model(), DRAFT_IDS, seed=0)
    save_head(tmp_path, content, tensors, layout="speculators", target=chat_model_folder(), verifier=verifier)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["speculators_config"]["verifier"] == {
        "name_or_path": verifier or str(chat_model_folder().resolve()),
        "architectures": ["LlamaForCausalLM"],
    }
    assert written["norm_before_residual"] is False
    assert written["transformer_layer_config"]["rope_theta"] == content["rope_theta"]


def measured(num_tokens, length):
    at = [
        Acceptance(temperature=temperature, length=length - temperature / 2, per_position=[0.5], num_steps=9)
        for temperature in (0.0, 1.0)
    ]
    return Measurement(num_tokens=num_tokens, at=at)


@pytest.mark.parametrize("count", [1, 2])
def test_a_card_has_the_curve_where_there_is_one(count):
    curve = [measured(10**6, 1.5), measured(3 * 10**6, 1.75)][:count]
    card = model_card(target="small", command="forerun train small", facts={"seed": 0}, measured=curve[-1], curve=curve)
    assert card.startswith("# EAGLE-3 head for small")
    assert ("| 3.00M tokens | 1.75 | 1.25 |" in card) == (count == 2)


def test_a_card_says_how_to_draft_as_was_measured():
    card = model_card(target="small", command="forerun train small", facts={}, measured=measured(10**6, 1.5))
    for name, value in DRAFTING.items():
        assert f"--speculative-config.{name.replace('_', '-')} {value}" in card


@pytest.mark.parametrize(
    ("draft_ms", "said"), [(0.5, "a drafted token took 0.50 ms, and greedy text"), (None, "greedy text")]
)
def test_a_card_says_what_was_measured_of_its_times(draft_ms, said):
    of_times = replace(measured(10**6, 1.5), draft_ms=draft_ms, speed_up=1.25)
    card = model_card(target="small", command="forerun train small", facts={}, measured=of_times)
    assert f"On the machine of the training {said}" in card
    assert "of one sequence came 1.25 times as fast" in card
