"""Prompts that another engine has read are answered with the bits of one engine, by every drafter."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import time

import pytest

from forerun import SamplingParams
from forerun.deploy.disaggregated import channel
from forerun.drafters.base import MovesKV
from forerun.engine.client import EngineRequest
from forerun.engine.kv_transfer import export_kv
from forerun.errors import ConfigError
from tests.contract.drafters import CASES, OWN_KV, REPRESENTATIVE, usually
from tests.contract.test_bit_identical import reported, sampling_of
from tests.contract.test_contract import PROMPTS, assert_nothing_is_held
from tests.deploy.disaggregated.in_one_process import disaggregated, needs_shared_memory
from tests.engines import engine_of, native_target, storage, tiny_llm
from tests.native import needs_kernels

pytestmark = [needs_kernels, needs_shared_memory]

LONG = [prompt for prompt in PROMPTS if len(prompt) > 12][:10]
SAMPLING = [sampling_of(index) for index in range(len(LONG))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def run(llm):
    return [reported(output) for output in llm.generate(LONG, SAMPLING, use_tqdm=False)]


@functools.cache
def plainly():
    """What one engine gives that drafts nothing."""
    return run(tiny_llm(target=native_target()))


@pytest.mark.parametrize("name", usually(CASES, chosen={*REPRESENTATIVE, *OWN_KV}))
def test_text_and_logprobs_are_those_of_one_engine_with_any_drafter(name):
    with disaggregated(CASES[name], target=native_target()) as (llm, engine):
        assert run(llm) == plainly()
        transfers = engine.transfers
        assert transfers.num_failures == 0
        assert transfers.num_prompts == sum(one.prompt_logprobs is None for one in SAMPLING)
        assert transfers.num_tokens > 0
        metrics = {one.name: one for one in llm.get_metrics()}
        assert metrics["forerun:kv_transfer_tokens"].value == transfers.num_tokens
        assert_nothing_is_held(llm)


@pytest.mark.parametrize("name", OWN_KV)
def test_the_drafts_are_those_of_an_engine_that_has_read_the_prompt_itself(name):
    prompt = max(LONG, key=len)
    (alone,) = tiny_llm(CASES[name], target=native_target(), verifies_all=True).generate(
        [prompt], GREEDY, use_tqdm=False
    )
    with disaggregated(CASES[name], target=native_target(), verifies_all=True) as (llm, _):
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        drafter = engine_of(llm).executor.drafting.drafter
        assert isinstance(drafter, MovesKV)
        own = export_kv(llm.engine.parts, prompt).caches[1:]
    assert output.num_cached_tokens == len(prompt[:-1]) // 4 * 4
    assert output.speculation == alone.speculation
    assert own
    assert all(cache.places == tuple(range(len(prompt[:-1]) // 4)) for cache in own)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_hidden_states_are_saved_by_the_engine_that_answers_alone(num_tokens, tmp_path):
    """The other's request ends with its first token, by the length where a prompt leaves room for no more."""
    config = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}},
    }
    folders = [tmp_path / "answers", tmp_path / "reads"]
    answers, reads = ({"kv_transfer_config": storage(folder)} for folder in folders)
    length = len(LONG[0]) + num_tokens
    with disaggregated(config, target=native_target(), max_model_len=length, prefill=reads, **answers) as (llm, engine):
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        (output,) = llm.generate([LONG[0]], sampling, use_tqdm=False)
        assert engine.transfers.num_prompts == 1
    assert [len(list(folder.glob("*.safetensors"))) for folder in folders] == [1, 0]
    assert output.kv_transfer_params["hidden_states_path"].startswith(str(folders[0]))


def test_what_is_cached_here_is_not_sent_again_and_short_prompts_are_not_sent_at_all():
    with disaggregated(target=native_target(), max_local_prefill_length=8) as (llm, engine):
        llm.generate([LONG[0], LONG[0][:8]], GREEDY, use_tqdm=False)
        assert engine.transfers.num_prompts == 1
        llm.generate([LONG[0] + [3, 4]], GREEDY, use_tqdm=False)
        assert engine.transfers.num_prompts == 1


def test_prompts_with_different_salts_share_nothing():
    with disaggregated(target=native_target()) as (llm, engine):
        given = [{"prompt_token_ids": LONG[0], "cache_salt": salt} for salt in ("a", "b", "a")]
        found = [llm.generate([one], GREEDY, use_tqdm=False)[0] for one in given]
        assert engine.transfers.num_prompts == 2
        assert len({tuple(one.outputs[0].token_ids) for one in found}) == 1


def test_without_memory_for_all_prompts_those_that_have_arrived_wait():
    tight = {"num_gpu_blocks_override": 40, "max_num_seqs": 24}
    ample = {"num_gpu_blocks_override": 512}
    with disaggregated(target=native_target(), prefill=ample, **tight) as (llm, engine):
        assert run(llm) == plainly()
        assert engine.transfers.num_failures == 0
        assert_nothing_is_held(llm)


def test_nobody_is_queued_before_a_prompt_whose_kv_waits_for_memory():
    tight = {"num_gpu_blocks_override": 24, "max_model_len": 96}
    long, sampling = [(5 * place) % 89 + 3 for place in range(60)], SamplingParams(max_tokens=30, ignore_eos=True)
    ample = {"num_gpu_blocks_override": 512}
    with disaggregated(target=native_target(), prefill=ample, max_local_prefill_length=16, **tight) as (_, engine):

        def submit(name, prompt):
            engine.accept(EngineRequest(request_id=name, prompt_ids=prompt, sampling=sampling))
            engine.submit(name)

        submit("runs", LONG[0][:16])
        while engine.snapshot().state.kv_usage < 0.4:
            engine.step()
        submit("long", long)
        while engine._reading:  # without a step, so that what runs holds its memory
            engine._take_arrivals()
            time.sleep(0.001)
        assert engine.snapshot().state.num_waiting == 1
        submit("later", LONG[1][:8])
        assert engine.snapshot().state.num_waiting == 2
        ended = []
        while engine.has_work:
            ended += [one.request_id for one in engine.step().finished]
        assert ended == ["runs", "long", "later"]
        assert engine.transfers.num_prompts == 1


def test_a_reader_that_goes_leaves_its_prompts_to_this_engine():
    with disaggregated(target=native_target()) as (llm, engine):
        engine._prefill._channel.close()
        assert run(llm) == plainly()
        assert engine.transfers.num_failures > 0
        assert run(llm) == plainly()


def test_an_aborted_request_leaves_nothing_and_its_kv_is_dropped():
    with disaggregated(target=native_target()) as (llm, engine):
        engine.accept(EngineRequest(request_id="a", prompt_ids=LONG[0], sampling=GREEDY))
        engine.submit("a")
        assert engine.has_work
        assert engine.snapshot().state.num_waiting == 1
        engine.abort("a")
        assert not engine.has_work
        llm.generate([LONG[1]], GREEDY, use_tqdm=False)
        assert engine.transfers.num_prompts == 1
        assert_nothing_is_held(llm)


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_a_request_that_is_aborted_before_its_prompt_is_read_ends_as_one_that_waits(is_asked_for):
    alone = tiny_llm(target=native_target()).engine
    with disaggregated(target=native_target()) as (_, engine):
        if not is_asked_for:
            engine._has_room_for = lambda num_blocks: False
        ended = []
        for one in (alone, engine):
            one.accept(EngineRequest(request_id="a", prompt_ids=LONG[0], sampling=GREEDY))
            one.submit("a")
            ended.append(one.abort("a"))
            assert not one.has_work
        assert reported(ended[1]) == reported(ended[0])
        assert ended[1].outputs[0].finish_reason == "abort"
        assert engine.snapshot().stats.num_finished == alone.snapshot().stats.num_finished


@pytest.mark.parametrize("failing", [1, 2], ids=["the prompt", "its KV"])
def test_what_finds_no_shared_memory_is_read_here_and_the_next_prompt_there(failing, monkeypatch):
    shared, calls = channel._shared, itertools.count(1)

    def at_times(tensors):
        if next(calls) == failing:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return shared(tensors)

    monkeypatch.setattr(channel, "_shared", at_times)
    with disaggregated(target=native_target()) as (llm, engine):
        for index, num_failures in enumerate((1, 1)):
            (output,) = llm.generate([LONG[index]], [SAMPLING[index]], use_tqdm=False)
            assert reported(output) == plainly()[index]
            assert engine.transfers.num_failures == num_failures
        assert engine.transfers.num_prompts == 1
        assert_nothing_is_held(llm)


def test_streams_get_the_text_of_one_engine():
    (alone,) = tiny_llm(target=native_target()).generate([LONG[0]], GREEDY, use_tqdm=False)
    with disaggregated(target=native_target()) as (llm, _):
        text = "".join(delta.text for delta in llm.stream([LONG[0]], GREEDY))
    assert text == alone.outputs[0].text


def test_an_engine_without_a_prefix_cache_is_refused():
    with (
        pytest.raises(ConfigError, match="enable_prefix_caching: got False"),
        disaggregated(target=native_target(), enable_prefix_caching=False),
    ):
        pass
