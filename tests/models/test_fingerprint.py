"""A fingerprint tells models apart by their weights and vocabulary, and by nothing else."""

from __future__ import annotations

import shutil

import pytest
import torch

from forerun.models.fingerprint import fingerprint_of_files
from tests.engines import tiny_target
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", seed=1, vocab_size=97)


def test_a_copy_under_another_name_is_the_same_model(model, tmp_path):
    copied = shutil.copytree(model, tmp_path / "renamed")
    (copied / "README.md").write_text("a note")
    assert fingerprint_of_files(copied) == fingerprint_of_files(model)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_another_byte_in_what_makes_the_model_is_another_model(model, tmp_path, file):
    changed = shutil.copytree(model, tmp_path / "changed") / file
    changed.write_bytes((changed.read_bytes() if changed.exists() else b"{}") + b" ")
    assert fingerprint_of_files(changed.parent) != fingerprint_of_files(model)


def test_other_weights_of_the_same_shape_are_another_model(model, tmp_path):
    other = save_tiny_model(tmp_path / "other", "LlamaForCausalLM", seed=2, vocab_size=97)
    assert fingerprint_of_files(other) != fingerprint_of_files(model)


def test_a_link_that_leads_nowhere_does_not_count(model, tmp_path):
    linked = shutil.copytree(model, tmp_path / "linked")
    (linked / "pytorch_model.bin").symlink_to(tmp_path / "absent")
    assert fingerprint_of_files(linked) == fingerprint_of_files(model)


def test_models_made_in_memory_are_told_apart_by_their_heads():
    target = tiny_target()
    assert target.path is None
    assert target.fingerprint() == target.fingerprint()
    assert target.fingerprint() != tiny_target("Qwen2ForCausalLM").fingerprint()
    assert torch.is_tensor(target.model.head_rows(torch.arange(2)))
