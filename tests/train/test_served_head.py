"""The engine's logits of a stored head are the trainer's, and where they differ nothing is trained."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import ConfigError
from forerun.train.packaging import LAYOUTS, save_head
from forerun.train.served_head import MOST_DISTANCE, check_served_head, served_logits
from tests.native import needs_kernels
from tests.train.target_folder import chat_model, chat_model_folder
from tests.train.test_eagle3_trainer import learned, trainer


def stored(training, folder, *, layout="specforge"):
    save_head(folder, training.content, training.tensors(), layout=layout, target=chat_model_folder())
    return folder


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_stored_head_computes_the_trainers_probabilities_of_each_token(tmp_path, layout, num_steps):
    training = trainer()
    for _ in range(num_steps):
        training.run_step()
    (text,) = learned(1)
    observed = training.observe([text])
    found = served_logits(stored(training, tmp_path, layout=layout), chat_model(), observed).softmax(-1)
    expected = training.logits(observed).softmax(-1)
    assert found.shape == (len(text.places), 132)
    assert ((found - expected).abs().sum(-1) / 2).max() < 0.1 * MOST_DISTANCE
    check_served_head(training, tmp_path, chat_model(), text)


def rolled(name):
    """A matrix whose columns lie one feature, or whose rows lie one token beside where they were."""

    def damage(folder):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        amount, dim = (tensors[name].shape[1] // 3, 1) if name.startswith("fc") else (1, 0)
        save_file({**tensors, name: tensors[name].roll(amount, dim).contiguous()}, path)

    return damage


def configured(**changes):
    """Other keys in config.json."""

    def damage(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


@needs_kernels
@pytest.mark.parametrize(
    "damage",
    [rolled("fc.weight"), rolled("lm_head.weight"), configured(norm_before_residual=True), configured(rope_theta=3.0)],
)
def test_a_head_that_is_read_otherwise_is_refused(tmp_path, damage):
    training = trainer()
    damage(stored(training, tmp_path))
    with pytest.raises(
        ConfigError, match=r"the engine's logits and the trainer's differ: on average \d+% .* forerun collect-env"
    ):
        check_served_head(training, tmp_path, chat_model(), learned(1)[0])


@needs_kernels
def test_logits_that_are_no_numbers_are_refused(tmp_path):
    training = trainer()
    with torch.no_grad():
        training._masters["fc.weight"][0, 0] = float("nan")
    with pytest.raises(ConfigError, match="the engine's logits and the trainer's differ"):
        check_served_head(training, stored(training, tmp_path), chat_model(), learned(1)[0])
