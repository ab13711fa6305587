"""The target drafts for itself, from its first layers or in int8."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import LLM, SamplingParams
from forerun.drafters.draft_model import load_beside
from forerun.errors import ConfigError
from forerun.models.base import LoadedTarget
from forerun.models.loader import load_model
from tests.contract.test_contract import PROMPTS, TIGHT
from tests.drafters.test_draft_model import GREEDY, SAMPLED, rate
from tests.engines import engine_of, tiny_llm
from tests.models.test_loader import NEOX, save
from tests.native import generator, needs_kernels
from tests.stand_in import VOCAB_SIZE, save_stand_in
from tests.tiny_models import save_tiny_model, tiny_config
from tests.tiny_tokenizer import save_tiny_tokenizer

IN_BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def idle_last_layer(tmp_path_factory):
    """A target whose last of three layers adds nothing, so that its first two are always right."""
    folder = save_tiny_model(tmp_path_factory.mktemp("idle"), seed=1, vocab_size=97)
    weights = load_file(folder / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.2.{name}.weight"].zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    return LoadedTarget(model=model, tokenizer=None, eos_token_ids=frozenset({5}))


def exiting(layer=2, **settings):
    return {"method": "self", "exit_layer": layer, "num_speculative_tokens": 5, **settings}


def test_layers_that_say_what_all_say_are_always_right(idle_last_layer):
    assert rate(tiny_llm(exiting(), target=idle_last_layer), PROMPTS[:8], GREEDY) == 1.0


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_at_any_block_size(idle_last_layer, block_size):
    llm = tiny_llm(exiting(num_speculative_tokens=9), target=idle_last_layer, block_size=block_size)
    assert rate(llm, PROMPTS[:6], GREEDY) == 1.0


def test_where_sequences_are_preempted_prompts_chunked_and_prefixes_found(idle_last_layer):
    llm = tiny_llm(exiting(), target=idle_last_layer, **TIGHT)
    assert rate(llm, PROMPTS[:16], GREEDY) == 1.0
    assert engine_of(llm).scheduler.num_preemptions > 0
    assert engine_of(llm).scheduler.num_cached_tokens > 0


def test_coupled_drafts_follow_sampled_texts(idle_last_layer):
    llm = tiny_llm(exiting(draft_sample_method="coupled"), target=idle_last_layer)
    assert rate(llm, PROMPTS[:8], SAMPLED) == 1.0


def test_no_kv_is_kept_twice(idle_last_layer):
    settings = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20, "target": idle_last_layer}
    plain, drafted = (engine_of(tiny_llm(config, **settings)).pool.num_blocks for config in (None, exiting()))
    assert plain == drafted


def lay_on_grid(folder):
    """Replace the matrices of the layers by random ones of 16 values, all of which each 32 inputs have the range of."""
    weights = load_file(folder / "model.safetensors")
    for number, (name, weight) in enumerate(sorted(weights.items())):
        if name.endswith("_proj.weight"):
            codes = torch.randint(16, weight.shape, generator=generator(number))
            codes[:, ::32], codes[:, 1::32] = 0, 15
            weights[name] = (codes - 7.0) / 32
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_in_fewer_bits_it_is_mostly_right(tmp_path, bits, dtype):
    folder = save_tiny_model(tmp_path, seed=3, vocab_size=VOCAB_SIZE, **IN_BLOCKS)
    save_tiny_tokenizer(folder, vocab_size=VOCAB_SIZE)
    lay_on_grid(folder)  # a random model of so few weights writes another text in 4 bits
    config = {"method": "self", "quantization": bits, "num_speculative_tokens": 3}
    llm = LLM(folder, dtype=dtype, speculative_config=config, max_model_len=128)
    assert rate(llm, PROMPTS[:8], GREEDY) > 0.7


@needs_kernels
def test_rows_are_rounded_to_eight_bits_where_the_drafts_weights_are_in_blocks(tmp_path):
    """Which no text can depend on, and takes half the time where blocks wait for arithmetic."""
    folder = save_tiny_model(tmp_path, seed=3, vocab_size=VOCAB_SIZE, **IN_BLOCKS)
    save_tiny_tokenizer(folder, vocab_size=VOCAB_SIZE)
    target = LLM(folder, dtype="bfloat16", max_model_len=128)._target
    rounds = {
        bits: load_beside(target, folder, quantization=bits, max_model_len=128).row_bits
        for bits in (None, "int8", "int4")
    }
    assert rounds == {None: 0, "int8": 0, "int4": 8}
    assert target.model.row_bits == 0


@needs_kernels
def test_a_target_of_made_up_weights_drafts_by_the_same_ones(tmp_path):
    tiny_config("LlamaForCausalLM", vocab_size=VOCAB_SIZE).save_pretrained(tmp_path)
    config = {"method": "self", "quantization": "int8", "num_speculative_tokens": 3}
    llm = LLM(tmp_path, load_format="dummy", dtype="bfloat16", speculative_config=config, max_model_len=128)
    assert rate(llm, PROMPTS[:8], GREEDY) > 0.7


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "method 'self' got quantization=None and exit_layer=None; give one of them"),
        ({"exit_layer": 1, "quantization": "int8"}, "got quantization='int8' and exit_layer=1; give one of them"),
        ({"exit_layer": 0}, "exit_layer: got 0; must be an integer of 1 or more"),
        ({"exit_layer": "2"}, "exit_layer: got '2'; must be an integer of 1 or more"),
        ({"exit_layer": True}, "exit_layer: got True; must be an integer of 1 or more"),
        ({"exit_layer": 3}, "exit_layer: got 3; must be from 1 to 2 for this target"),
        ({"quantization": "int3"}, "quantization .of the drafter.: got 'int3'; may be int8, int4"),
        ({"quantization": "int8"}, "loads the target's files again; it has none"),
        ({"exit_layer": 1, "model": "another"}, "method 'self' uses no draft model"),
    ],
)
def test_a_wrong_setting_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        tiny_llm({"method": "self", "num_speculative_tokens": 2, **settings})


def test_without_kernels_int8_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CPU_KERNELS", "off")
    folder = save_stand_in(tmp_path)
    with pytest.raises(ConfigError, match="which the native CPU kernels compute"):
        LLM(folder, speculative_config={"method": "self", "quantization": "int8", "num_speculative_tokens": 2})


def test_a_target_of_transformers_own_code_has_no_exit(tmp_path):
    model = load_model(save(NEOX, tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    target = LoadedTarget(model=model, tokenizer=None, eos_token_ids=frozenset())
    with pytest.raises(ConfigError, match="runs through transformers' own code"):
        tiny_llm(exiting(1), target=target, max_model_len=32)


def test_sampling_off_the_likeliest_needs_no_probabilities():
    off = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    config = exiting(1, draft_sample_method="probabilistic", rejection_sample_method="standard")
    assert len(tiny_llm(config).generate([[1, 2]], off, use_tqdm=False)[0].outputs[0].token_ids) == 4
