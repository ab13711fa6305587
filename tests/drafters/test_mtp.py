"""Drafts of MTP layers are those that a dense computation of the whole text gives, whatever became of the blocks."""

from __future__ import annotations

import functools

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.errors import ConfigError
from forerun.models.base import LoadedTarget
from forerun.models.loader import load_model
from tests.contract.test_contract import PROMPTS, TIGHT
from tests.drafters.recording import recorded
from tests.engines import engine_of, mtp_folder, tiny_llm
from tests.heads_mtp import KINDS, Reference, save_mtp_target
from tests.native import needs_kernels

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
OFF = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, speculation="off")
MTP = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Name of a layout -> a target, and the dense computation of its drafts."""

    @functools.cache
    def load(name):
        folder = save_mtp_target(tmp_path_factory.mktemp(name), name)
        model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
        target = LoadedTarget(model=model, tokenizer=None, eos_token_ids=frozenset({5}), path=folder)
        return target, Reference(folder, name)

    return load


@torch.inference_mode()
def assert_dense(drafts, reference, *, least):
    """Every draft is what the dense computation drafts."""
    drafts = [(text, draft) for text, draft in drafts if len(draft)]
    assert len(drafts) >= least
    for text, draft in drafts:
        chain = likeliest_path(draft)
        assert reference.draft(text, len(chain)) == chain


def likeliest_path(draft):
    """Tokens from the root down by first children, which are the likeliest."""
    tokens, node = [], -1
    while (node := next((i for i in range(len(draft)) if draft.parent(i) == node), None)) is not None:
        tokens.append(draft.token_ids[node])
    return tuple(tokens)


@pytest.mark.parametrize("name", KINDS)
def test_drafts_are_those_of_a_dense_computation(load, name):
    target, reference = load(name)
    llm = tiny_llm(MTP, target=target)
    drafts = recorded(llm)
    llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    assert_dense(drafts, reference, least=20)


def test_after_preemptions_in_chunks_and_from_cached_prefixes_too(load):
    target, reference = load("llama")
    llm = tiny_llm(MTP, target=target, **TIGHT)
    drafts = recorded(llm)
    llm.generate(PROMPTS[:24], GREEDY, use_tqdm=False)
    assert engine_of(llm).scheduler.num_preemptions > 0
    assert engine_of(llm).scheduler.num_cached_tokens > 0
    assert_dense(drafts[::2], reference, least=75)


def test_where_cached_blocks_come_from_a_sequence_that_was_not_drafted_for(load):
    target, reference = load("llama")
    llm = tiny_llm(MTP, target=target)
    drafts = recorded(llm)
    llm.generate(PROMPTS[:6], OFF, use_tqdm=False)
    assert not any(len(draft) for _, draft in drafts)
    llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False)
    assert engine_of(llm).scheduler.num_cached_tokens > 0
    assert_dense(drafts, reference, least=40)


def test_the_likeliest_path_of_a_tree_is_the_chain(load):
    target, reference = load("llama")
    llm = tiny_llm({"method": "mtp", "draft_tree": [2, 2, 1]}, target=target)
    drafts = recorded(llm)
    llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    assert max(len(draft) for _, draft in drafts) == 10
    assert_dense(drafts, reference, least=20)


def test_its_kv_and_features_count_in_the_memory():
    settings = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 256}
    plain, drafted = (engine_of(tiny_llm(config, **settings)).pool.num_blocks for config in (None, MTP))
    assert drafted == pytest.approx(plain * 3 * 32 / (4 * 32 + 48), abs=2)


@needs_kernels
def test_the_whole_way_from_a_folder():
    llm = LLM(mtp_folder(264), speculative_config=MTP, dtype="bfloat16", max_model_len=128)
    (output,) = llm.generate(["hello"], GREEDY, use_tqdm=False)
    assert output.speculation.num_draft_tokens > 0
    assert engine_of(llm).drafting.num_failures == 0


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_sample_method": "lucky"}, "draft_sample_method: got 'lucky'; may be greedy, probabilistic, coupled"),
        (
            {"draft_tree": [3, 2]},
            "draft_tree: has 9 nodes, num_speculative_tokens allows 3; raise it or leave nodes out",
        ),
        ({"num_speculative_tokens": None}, "method 'mtp' has no default"),
        ({"model": "another"}, "method 'mtp' uses no draft model"),
    ],
)
def test_a_wrong_setting_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        tiny_llm(MTP | settings)
