"""KV that goes from one engine to another lies there as if it had been computed there."""

from __future__ import annotations

import pytest
import torch

from forerun import SamplingParams
from forerun.engine.kv_transfer import export_kv, import_kv, num_missing_tokens
from forerun.errors import ConfigError
from forerun.kv.block_table import BlockTable
from forerun.kv.events import BlockEventLog, BlockStored
from tests.contract.drafters import CASES, OWN_KV
from tests.contract.test_contract import assert_nothing_is_held
from tests.engines import engine_of, native_target, tiny_llm
from tests.native import needs_kernels

PROMPT = [(7 * place) % 89 + 3 for place in range(30)]  # seven blocks of 4, and two tokens
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NUM_MOVED = 28


def having_read(prompt, config=None, **settings):
    llm = tiny_llm(config, **settings)
    llm.generate([prompt], GREEDY, use_tqdm=False)
    return llm


@needs_kernels
@pytest.mark.parametrize("name", OWN_KV)
def test_what_arrives_of_target_and_drafter_is_what_they_would_have_written(name):
    sent = export_kv(having_read(PROMPT, CASES[name], target=native_target()).engine.parts, PROMPT)
    other = tiny_llm(CASES[name], target=native_target())
    assert import_kv(other.engine.parts, sent)
    found = export_kv(other.engine.parts, PROMPT)
    assert found.token_ids == sent.token_ids == tuple(PROMPT[:NUM_MOVED])
    assert len(found.caches) > 1
    for ours, theirs in zip(found.caches, sent.caches, strict=True):
        assert ours.places == theirs.places
        assert all(a.equal(b) for a, b in zip(ours.tensors, theirs.tensors, strict=True))
    assert_nothing_is_held(other)


def test_what_has_arrived_is_found_and_not_computed_again():
    kv = export_kv(having_read(PROMPT).engine.parts, PROMPT)
    llm = tiny_llm()
    assert num_missing_tokens(llm.engine.parts, PROMPT, None) == NUM_MOVED
    assert import_kv(llm.engine.parts, kv)
    assert num_missing_tokens(llm.engine.parts, PROMPT, None) == 0
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == NUM_MOVED
    assert output.outputs[0].token_ids == having_read(PROMPT).generate([PROMPT], GREEDY)[0].outputs[0].token_ids


def test_blocks_that_are_there_stay_and_the_others_join_them():
    longer = [*PROMPT, *range(40, 60)]
    llm = having_read(PROMPT)
    pool = engine_of(llm).pool
    before = [pool.find(digest) for digest in digests_of(llm, PROMPT)]
    assert import_kv(llm.engine.parts, export_kv(having_read(longer).engine.parts, longer))
    assert [pool.find(digest) for digest in digests_of(llm, PROMPT)] == before
    assert num_missing_tokens(llm.engine.parts, longer, None) == 0
    assert import_kv(llm.engine.parts, export_kv(having_read(longer).engine.parts, longer)), "again changes nothing"
    assert_nothing_is_held(llm)


def digests_of(llm, prompt):
    return BlockTable(engine_of(llm).pool, block_size=4).prefix_digests(prompt)


def test_a_salt_keeps_it_apart_and_whoever_routes_hears_of_it():
    llm = tiny_llm()
    read = tiny_llm()
    read.generate([{"prompt_token_ids": PROMPT, "cache_salt": "mine"}], GREEDY, use_tqdm=False)
    events = engine_of(llm).pool.events = BlockEventLog()
    assert not export_kv(read.engine.parts, PROMPT).token_ids
    assert import_kv(llm.engine.parts, export_kv(read.engine.parts, PROMPT, "mine"))
    stored = events.take()
    assert all(isinstance(one, BlockStored) and one.cache_salt == "mine" for one in stored)
    assert [token for one in stored for token in one.token_ids] == PROMPT[:NUM_MOVED]
    assert num_missing_tokens(llm.engine.parts, PROMPT, None) == NUM_MOVED


def test_without_memory_nothing_changes():
    kv = export_kv(having_read(PROMPT).engine.parts, PROMPT)
    llm = tiny_llm(num_gpu_blocks_override=8, max_model_len=32)
    assert not import_kv(llm.engine.parts, kv, spare_blocks=2)
    assert num_missing_tokens(llm.engine.parts, PROMPT, None) == NUM_MOVED
    assert_nothing_is_held(llm)
    assert import_kv(llm.engine.parts, kv, spare_blocks=1)


def test_without_a_prefix_cache_there_is_no_place_for_it():
    kv = export_kv(having_read(PROMPT).engine.parts, PROMPT)
    assert not import_kv(tiny_llm(enable_prefix_caching=False).engine.parts, kv)


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        ("plain", {"block_size": 8}, "block_size: got KV in blocks of 8 tokens"),
        ("eagle3", {}, "same speculative_config"),
        ("medusa", {}, "same model, dtype, block_size and speculative_config"),
    ],
)
def test_kv_of_an_engine_that_differs_is_refused_and_nothing_is_held(config, changes, said):
    kv = export_kv(having_read(PROMPT, CASES[config], **changes).engine.parts, PROMPT)
    llm = tiny_llm()
    with pytest.raises(ConfigError, match=said):
        import_kv(llm.engine.parts, kv)
    assert_nothing_is_held(llm)


def test_a_cache_gives_back_what_was_put_into_it():
    cache = engine_of(tiny_llm()).executor.cache
    slots = torch.tensor([5, 2, 9])
    contents = [torch.rand_like(tensor) for tensor in cache.read(slots)]
    cache.write(slots, contents)
    assert all(a.equal(b) for a, b in zip(cache.read(slots), contents, strict=True))
    assert all(a.equal(b[:, :1]) for a, b in zip(cache.read(slots[:1]), contents, strict=True))
