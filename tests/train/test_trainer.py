"""Training changes every tensor of a head, and nothing else."""

from __future__ import annotations

from functools import partial
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file

from forerun.errors import ConfigError, ModelError
from forerun.executor.device_choice import with_layers_on_device
from forerun.models.base import LoadedTarget
from forerun.models.loader import load_model
from forerun.train.recipes import RECIPES
from forerun.train.trainer import TrainSettings, shuffled, train_head
from tests import heads_medusa
from tests.engines import native_target, tiny_llm, tiny_target
from tests.native import needs_kernels
from tests.tiny_models import save_tiny_model

TEXTS = [[(7 * i + j * j) % 97 for j in range(12)] for i in range(6)]
SHORT = TrainSettings(num_steps=2, batch_size=4, learning_rate=1e-3)
AUX = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
CONFIGS = {"eagle3": AUX}


def assert_all_trained(before, after):
    assert before.tensors.keys() == after.tensors.keys()
    for name, tensor in after.tensors.items():
        if tensor.is_floating_point():
            assert not torch.equal(tensor, before.tensors[name]), name
            assert tensor.isfinite().all(), name


@pytest.mark.parametrize("kind", RECIPES)
def test_every_tensor_learns(kind):
    config = CONFIGS.get(kind)
    once = train_head(kind, tiny_target(), TEXTS, TrainSettings(num_steps=1, learning_rate=1e-9), config=config)
    assert_all_trained(once, train_head(kind, tiny_target(), TEXTS, SHORT, config=config))


def test_a_reduced_vocabulary_is_that_of_the_most_frequent_tokens():
    head = train_head(
        "eagle3", tiny_target(), [[9, 9, 9, 50, 50, 7, 3, 3, 3, 3]], SHORT, config=AUX | {"draft_vocab_size": 3}
    )
    assert (head.tensors["d2t"] + torch.arange(3)).tolist() == [3, 9, 50]
    assert head.tensors["t2d"].nonzero().flatten().tolist() == [3, 9, 50]
    assert head.tensors["lm_head.weight"].shape == (3, 48)


@pytest.mark.parametrize("kind", RECIPES)
def test_a_seed_gives_the_same_head(kind):
    one, two = (train_head(kind, tiny_target(), TEXTS, SHORT, config=CONFIGS.get(kind)) for _ in range(2))
    assert all(torch.equal(one.tensors[name], two.tensors[name]) for name in one.tensors)


def test_a_target_in_bf16_trains_masters_in_fp32(tmp_path):
    model = load_model(save_tiny_model(tmp_path, vocab_size=97), dtype=torch.bfloat16, device=torch.device("cpu"))
    target = LoadedTarget(model=model, tokenizer=None, eos_token_ids=frozenset())
    once = train_head("eagle3", target, TEXTS, TrainSettings(num_steps=1, learning_rate=1e-9), config=AUX)
    head = train_head("eagle3", target, TEXTS, SHORT, config=AUX)
    assert_all_trained(once, head)
    assert {tensor.dtype for tensor in head.tensors.values()} == {torch.float32}


@pytest.mark.parametrize("kind", sorted(RECIPES.keys() - {"mtp"}))  # which lies beside its target's tensors
def test_what_is_saved_drafts(kind, tmp_path):
    head = train_head(kind, tiny_target(), TEXTS, SHORT, config=CONFIGS.get(kind))
    folder = head.save(tmp_path / "new" / "folder")
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in head.tensors.items())
    llm = tiny_llm({"method": kind, "model": str(folder), "num_speculative_tokens": 2})
    llm.generate([[1, 2, 3]], use_tqdm=False)
    assert llm.stats.speculation.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "eagle4"}, "kind of head: got 'eagle4'; may be eagle, eagle3"),
        ({"texts": []}, "texts: got none; each must have 2 to 512"),
        ({"texts": [[1, 2], [1]]}, "texts: got 1 to 2 tokens"),
        ({"texts": [[0] * 513]}, "texts: got 513 to 513 tokens"),
        ({"texts": [[5, 97]]}, "got token ids from 5 to 97; must be from 0 to 96"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, message):
    arguments = {"kind": "eagle", "target": tiny_target(), "texts": TEXTS} | changes
    with pytest.raises(ConfigError, match=message):
        train_head(**arguments)


@pytest.mark.parametrize("kind", RECIPES)
def test_the_shortest_texts_that_are_taken_are_learnt(kind):
    texts = [list(range(5 if kind == "dflash" else 2))]
    head = train_head(kind, tiny_target(), texts, SHORT, config=CONFIGS.get(kind))
    assert all(tensor.isfinite().all() for tensor in head.tensors.values())


def test_texts_that_no_block_fits_in_are_refused():
    with pytest.raises(
        ConfigError, match="texts: got one of 4 tokens; each must have at least 5 for a head of kind 'dflash'"
    ):
        train_head("dflash", tiny_target(), [*TEXTS, [1, 2, 3, 4]])


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
@pytest.mark.parametrize("size", [-1, 0, 98])
def test_a_draft_vocabulary_that_the_target_does_not_have_is_refused(kind, size):
    with pytest.raises(ConfigError, match=f"draft_vocab_size: got {size}; must be from 1 to 97"):
        train_head(kind, tiny_target(), TEXTS, SHORT, config=AUX | {"draft_vocab_size": size})


@pytest.mark.parametrize(
    "architecture", ["Qwen2ForCausalLM", "Phi3ForCausalLM", "Olmo2ForCausalLM", "MixtralForCausalLM"]
)
def test_a_layer_for_a_target_whose_layers_are_unlike_llamas_is_refused(architecture):
    with pytest.raises(ConfigError, match="'mtp' begins from layers like Llama's, this target has others"):
        train_head("mtp", tiny_target(architecture), TEXTS)


@pytest.mark.parametrize(
    ("kind", "published", "changes"),
    [
        ("medusa", partial(heads_medusa.medusa, num_heads=3, vocabularies="own"), {}),
        (
            "medusa",
            partial(heads_medusa.medusa, num_heads=2, num_blocks=2, vocabularies="own"),
            {"medusa_num_heads": 2, "medusa_num_layers": 2},
        ),
        ("mlp_speculator", partial(heads_medusa.mlp_speculator, num_steps=3, inner_dim=0), {}),
        (
            "mlp_speculator",
            partial(heads_medusa.mlp_speculator, tie_weights=True),
            {"tie_weights": True, "n_predict": 4, "inner_dim": 40},
        ),
    ],
)
def test_heads_have_the_names_that_they_are_published_with(kind, published, changes):
    config, tensors = published(tiny_target())
    head = train_head(kind, tiny_target(), TEXTS, SHORT, config=changes)
    assert {name: tensor.shape for name, tensor in head.tensors.items()} == {
        name: tensor.shape for name, tensor in tensors.items()
    }
    assert head.config.get("architectures") == config.get("architectures")
    assert head.config.get("model_type") == config.get("model_type")


@needs_kernels
def test_native_kernels_have_no_gradients():
    with pytest.raises(ConfigError, match="runs on kernels"):
        train_head("eagle", native_target(), TEXTS)


def test_layers_of_the_device_have_no_gradients():
    with pytest.raises(ConfigError, match="runs on kernels"):
        train_head("eagle", with_layers_on_device(tiny_target(), max_length=64), TEXTS)


def test_a_configuration_that_no_head_can_have_is_refused():
    with pytest.raises(ModelError, match="input_norm"):
        train_head("eagle3", tiny_target(), TEXTS, SHORT, config=AUX | {"norm_before_fc": True})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 0}, "num_steps: got 0; must be above 0"),
        ({"batch_size": -1}, "batch_size: got -1; must be above 0"),
        ({"learning_rate": 0.0}, "learning_rate: got 0.0; must be above 0"),
        ({"warm_up": 2.0}, "warm_up: got 2.0; must be from 0 to 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainSettings(**settings)


def test_the_rate_warms_up_and_falls_to_zero():
    settings = TrainSettings(num_steps=100, warm_up=0.1)
    rates = [settings.rate(step) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0)


def test_each_round_takes_every_text_once_in_an_order_of_its_own():
    texts = [[i, i] for i in range(10)]
    taken = [text[0] for chosen in islice(shuffled(texts, size=4, seed=0), 10) for text in chosen]
    rounds = [taken[first : first + 10] for first in range(0, 40, 10)]
    assert all(sorted(one) == list(range(10)) for one in rounds)
    assert len({tuple(one) for one in rounds}) == 4


def test_a_batch_may_be_larger_than_all_texts():
    (chosen,) = islice(shuffled([[1, 1], [2, 2]], size=5, seed=0), 1)
    assert len(chosen) == 5
