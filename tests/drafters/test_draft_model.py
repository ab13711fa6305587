"""A draft model that is the target itself is always right: any stale, shifted or missing entry would show."""

from __future__ import annotations

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.errors import ConfigError, ModelError
from tests.contract.test_contract import PROMPTS, TIGHT
from tests.engines import VOCAB_SIZE, engine_of, native_target, tiny_drafter, tiny_llm
from tests.native import needs_kernels

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=24, ignore_eos=True)


def twin(**settings):
    """A config whose drafter has the target's own weights."""
    return {
        "method": "draft_model",
        "model": tiny_drafter(VOCAB_SIZE, noise=0.0),
        "num_speculative_tokens": 5,
        **settings,
    }


def rate(llm, prompts, sampling):
    """Accepted / drafted tokens; the texts end long before the drafts would."""
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    drafted = sum(output.speculation.num_draft_tokens for output in outputs)
    assert drafted > 10 * len(prompts)
    return sum(output.speculation.num_accepted_tokens for output in outputs) / drafted


def test_the_target_agrees_with_its_twin():
    assert rate(tiny_llm(twin()), PROMPTS[:8], GREEDY) == 1.0


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("num_tokens", [1, 4, 17])
def test_at_any_block_size_and_length_of_draft(block_size, num_tokens):
    llm = tiny_llm(twin(num_speculative_tokens=num_tokens), block_size=block_size)
    assert rate(llm, PROMPTS[:6], GREEDY) == 1.0


def test_where_prompts_share_cached_blocks_in_a_second_run_too():
    llm = tiny_llm(twin())
    rates = [rate(llm, PROMPTS[:24], GREEDY) for _ in range(2)]
    assert engine_of(llm).scheduler.num_cached_tokens > 0
    assert rates == [1.0, 1.0]


def test_where_cached_blocks_come_from_a_sequence_that_was_not_drafted_for():
    llm = tiny_llm(twin())
    off = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, speculation="off")
    llm.generate(PROMPTS[:8], off, use_tqdm=False)
    assert rate(llm, PROMPTS[:8], GREEDY) == 1.0


def test_where_sequences_are_preempted_and_prompts_chunked():
    llm = tiny_llm(twin(), **TIGHT)
    assert rate(llm, PROMPTS[:16], GREEDY) == 1.0
    assert engine_of(llm).scheduler.num_preemptions > 0


def test_a_long_prompt_is_read_in_parts(monkeypatch):
    monkeypatch.setattr("forerun.drafters.neural.forward.MAX_TEXT_ROWS", 7)
    assert rate(tiny_llm(twin()), PROMPTS[:8], GREEDY) == 1.0


def test_a_coupled_drafter_draws_what_the_target_draws():
    assert rate(tiny_llm(twin(draft_sample_method="coupled")), PROMPTS[:8], SAMPLED) == 1.0


@pytest.mark.parametrize("method", ["standard", "block"])
def test_equal_probabilities_are_never_rejected(method):
    config = twin(draft_sample_method="probabilistic", rejection_sample_method=method)
    assert rate(tiny_llm(config), PROMPTS[:8], SAMPLED) == 1.0


@pytest.mark.parametrize(
    ("tree", "depth"),
    [([3, 2, 1], 3), ([[0], [1], [0, 0], [0, 1], [0, 0, 0], [1, 0]], 3), ({"top_k": 1, "depth": 5}, 5)],
)
@pytest.mark.parametrize("block_size", [2, 16])
def test_one_path_of_a_twins_tree_is_accepted_to_its_end(tree, depth, block_size):
    config = twin(num_speculative_tokens=30, draft_tree=tree)
    sampling = SamplingParams(temperature=0, max_tokens=1 + 4 * (depth + 1), ignore_eos=True)
    llm = tiny_llm(config, block_size=block_size)
    for output in llm.generate(PROMPTS[:8], sampling, use_tqdm=False):
        assert output.speculation.num_accepted_tokens == 4 * depth


def test_a_coupled_tree_holds_what_the_target_draws():
    config = twin(num_speculative_tokens=30, draft_tree=[2, 2, 1], draft_sample_method="coupled")
    sampling = SamplingParams(temperature=0.9, seed=5, max_tokens=17, ignore_eos=True)
    for output in tiny_llm(config).generate(PROMPTS[:8], sampling, use_tqdm=False):
        assert output.speculation.num_accepted_tokens == 4 * 3


def test_a_greedy_drafter_of_a_sampled_text_is_wrong_at_times():
    assert rate(tiny_llm(twin()), PROMPTS[:8], SAMPLED) < 1.0


@needs_kernels
def test_on_the_kernels_in_bf16_too():
    config = twin(model=tiny_drafter(264, noise=0.0))
    assert rate(tiny_llm(config, target=native_target(torch.bfloat16)), PROMPTS[:8], GREEDY) == 1.0


def test_beyond_its_own_maximum_it_drafts_nothing_and_the_text_goes_on():
    llm = tiny_llm(twin(max_model_len=30))
    sampling = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    short, long = llm.generate([[1, 2, 3], list(range(40))], sampling, use_tqdm=False)
    assert long.speculation.num_draft_tokens == 0
    assert 15 < short.speculation.num_draft_tokens <= 30
    assert [len(output.outputs[0].token_ids) for output in (short, long)] == [60, 60]


def test_its_kv_counts_in_the_memory():
    settings = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 256}
    plain, drafted = (engine_of(tiny_llm(config, **settings)).pool.num_blocks for config in (None, twin()))
    assert plain == pytest.approx(2 * drafted, abs=2)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": None}, "method 'draft_model' needs 'model', got None"),
        ({"model": ""}, "method 'draft_model' needs 'model', got ''"),
        (
            {"quantization": "int3"},
            "quantization .of the drafter.: got 'int3'; may be int8, int4, int4-symmetric, or None",
        ),
        ({"quantization": "int8"}, "which the native CPU kernels compute"),
        ({"draft_sample_method": "lucky"}, "draft_sample_method: got 'lucky'; may be greedy, probabilistic, coupled"),
        ({"max_model_len": 0}, "max_model_len .of the drafter.: got 0; must be an integer of 1 or more"),
        ({"max_model_len": "512"}, "max_model_len .of the drafter.: got .512.; must be an integer of 1 or more"),
        ({"max_model_len": 10**6}, "its checkpoint allows at most 512; lower it"),
        ({"num_speculative_tokens": None}, "method 'draft_model' has no default"),
        (
            {"draft_tree": [3, 2]},
            "draft_tree: has 9 nodes, num_speculative_tokens allows 5; raise it or leave nodes out",
        ),
        (
            {"draft_tree": {"top_k": 2, "depth": 2}, "draft_sample_method": "coupled"},
            "got 'coupled' with a dynamic draft_tree, which takes the likeliest tokens; must be 'greedy'",
        ),
    ],
)
def test_a_wrong_setting_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        tiny_llm({key: value for key, value in twin(**settings).items() if (key, value) != ("model", None)})


def test_another_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="has a vocabulary of 264 tokens, the target of 97; must be the same"):
        tiny_llm(twin(model=tiny_drafter(264)))


def test_a_drafter_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelError):
        tiny_llm(twin(model=str(tmp_path / "nothing")))


def test_a_folder_alone_means_a_draft_model():
    config = twin()
    del config["method"]
    assert tiny_llm(config).speculative.method == "draft_model"


def test_the_whole_way_from_folders(tmp_path):
    folder = tiny_drafter(264, noise=0.0)
    llm = LLM(folder, speculative_config=twin(model=str(folder)), max_model_len=128)
    (output,) = llm.generate(["hello"], GREEDY, use_tqdm=False)
    assert output.speculation.acceptance_rate == 1.0
