"""Recorded steps: what a graph replays depends on what its tensors hold, never on what the host knew when it was recorded."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from forerun import SamplingParams
from forerun.errors import DeviceLostError
from forerun.executor.step_graphs import launch_bytes
from tests.contract.drafters import CASES, usually
from tests.contract.test_contract import GREEDY, PROMPTS, TIGHT, assert_nothing_is_held
from tests.engines import tiny_llm, tiny_target
from tests.executor.test_device import requests, texts
from tests.executor.test_device_late import DYNAMIC_TREE, NGRAM, REPEATING, TREE, HostReads
from tests.foreign import few_tokens
from tests.step_recorder import SIZES, ClosureRecorder


def graph_llm(config=None, *, sizes=SIZES, recorder=None, **settings):
    llm = tiny_llm(config, device_step=True, **settings)
    recorder = recorder or ClosureRecorder()
    llm.executor.use_graphs(sizes, recorder)
    return llm, recorder


@pytest.fixture(scope="module")
def plain_texts():
    return texts(tiny_llm(enable_prefix_caching=False), 20)


def without_logprobs(count):
    return [replace(one, logprobs=None) for one in requests(count)]


REPLAYED = ["plain", "ngram", "suffix-tree", "random-tree", "recycle", "draft-model-coupled", "eagle3", "self-exit"]
TREES = ["draft-model-tree", "eagle-tree", "eagle3-dynamic-tree"]
AT_ONCE = ["pard", "peagle", "dflash", "medusa", "mlp-speculator"]
AT_ONCE_TREES = [
    *(f"{method}-tree" for method in ("pard", "dflash", "medusa", "mlp-speculator")),
    "peagle-dynamic-tree",
]


# What drafters of one pass draft in recorded steps is in tests/drafters/neural/test_device.py, for each of them.
USUALLY = [*REPLAYED, "draft-model-tree", "eagle3-dynamic-tree", "dflash", "medusa-tree"]


@pytest.mark.parametrize("case", usually([*REPLAYED, *TREES, *AT_ONCE, *AT_ONCE_TREES], chosen=USUALLY))
def test_replayed_steps_give_the_texts_of_the_host(case, plain_texts):
    llm, recorder = graph_llm(CASES[case], **TIGHT)
    outputs = llm.generate(PROMPTS[:8], without_logprobs(8), use_tqdm=False)
    assert [(one.outputs[0].token_ids, one.outputs[0].finish_reason) for one in outputs] == plain_texts[:8]
    assert llm.stats.times.num_replayed_steps == recorder.num_replayed > 0.5 * llm.stats.times.num_steps
    assert llm.stats.num_failed_drafts == 0
    assert_nothing_is_held(llm)


def test_what_launches_take_grows_with_the_number_of_graphs():
    model = tiny_target().model
    assert 0 < launch_bytes(model, [256]) < launch_bytes(model, [1, 256]) < launch_bytes(model, [1, 2, 512])


def test_each_size_is_recorded_at_the_start_and_what_is_rare_when_it_comes():
    llm, recorder = graph_llm(NGRAM)
    assert recorder.num_recorded == len(SIZES)
    llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    assert recorder.num_recorded == len(SIZES)
    assert recorder.num_replayed > 0
    trees, recorder = graph_llm(CASES["random-tree"])
    trees.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    assert recorder.num_recorded == len(SIZES), "a drafter of the host may draft trees, which is known at the start"
    assert recorder.num_replayed > 0


def test_steps_in_which_nobody_is_asked_for_a_draft_need_no_graphs_of_their_own_where_the_device_looks_up(plain_texts):
    llm, recorder = graph_llm(NGRAM)
    undrafted = [replace(one, speculation={"num_speculative_tokens": 0}) for one in without_logprobs(8)]
    outputs = llm.generate(PROMPTS[:8], undrafted, use_tqdm=False)
    assert [(one.outputs[0].token_ids, one.outputs[0].finish_reason) for one in outputs] == plain_texts[:8]
    assert llm.stats.speculation.num_draft_tokens == 0
    assert recorder.num_recorded == len(SIZES)
    assert recorder.num_replayed > 0


def test_steps_with_more_rows_and_those_whose_logits_are_read_run_eagerly(plain_texts):
    llm, recorder = graph_llm(sizes=[1, 2])
    assert texts(llm, 4) == plain_texts[:4]
    assert recorder.num_replayed == 0
    llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    assert recorder.num_replayed == 0
    llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    assert recorder.num_replayed > 4


def test_masks_of_the_host_reach_a_recorded_step():
    words = [SamplingParams(temperature=1.0, seed=i, max_tokens=12, bad_words=[word]) for i, word in enumerate("aeth")]
    target = replace(tiny_target(), tokenizer=few_tokens())

    def outputs(llm):
        return [one.outputs[0].token_ids for one in llm.generate(PROMPTS[:4], words, use_tqdm=False)]

    llm, recorder = graph_llm(NGRAM, target=target)
    assert outputs(llm) == outputs(tiny_llm(target=target))
    assert recorder.num_recorded > len(SIZES)
    assert recorder.num_replayed > 8


FEWER = {"16 is padded to 24": [16], "all above 8 are eager": [12, 16, 24, 32], "12 and 24 are padded": [12, 24]}


@pytest.mark.parametrize("failed", FEWER.values(), ids=FEWER)
def test_sizes_that_could_not_be_recorded_are_left_out_and_named_once(failed, caplog, plain_texts):
    numbers = {SIZES[::-1].index(size) + 1 for size in failed}
    with caplog.at_level(logging.WARNING):
        llm, recorder = graph_llm(recorder=ClosureRecorder(fails_at=numbers))
        llm.generate(PROMPTS[:14], GREEDY, use_tqdm=False)
        llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False)
        assert texts(llm, 4) == plain_texts[:4]
    sizes = [SIZES[::-1][number - 1] for number in recorder.replayed]
    assert recorder.num_recorded == len(SIZES)
    assert not {*sizes} & {*failed}
    recorded = [size for size in SIZES if size not in failed]
    assert llm.executor.graphs.most_rows == max(recorded)
    assert (sizes.count(next((size for size in recorded if size >= 14), 0)) > 8) == (max(recorded) >= 14)
    assert sizes.count(8) > 8
    assert llm.stats.times.num_replayed_steps == recorder.num_replayed
    [record] = [one for one in caplog.records if "CUDA graphs" in one.message]
    assert f"steps of {', '.join(map(str, failed))} rows could not be recorded" in record.message
    assert "padded to a larger size or run eagerly" in record.message
    assert "operation not permitted when stream is capturing" in record.message
    assert "more lines" not in record.message
    assert "enforce_eager" in record.message


def test_where_no_size_can_be_recorded_all_steps_are_eager(caplog, plain_texts):
    with caplog.at_level(logging.WARNING):
        llm, recorder = graph_llm(recorder=ClosureRecorder(fails_at=range(1, 100)))
        llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
        assert texts(llm, 4) == plain_texts[:4]
    assert recorder.num_recorded == len(SIZES), "none is tried again"
    assert llm.executor.graphs.most_rows is None
    assert recorder.num_replayed == llm.stats.times.num_replayed_steps == 0
    [record] = [one for one in caplog.records if "CUDA graphs" in one.message]
    assert "1, 2, 4, 8, 12, 16, 24, 32 rows could not be recorded" in record.message
    assert "they run eagerly" in record.message


def test_where_what_is_rare_cannot_be_recorded_the_usual_steps_are_graphs_still(caplog):
    target = replace(tiny_target(), tokenizer=few_tokens())
    words = [SamplingParams(temperature=1.0, seed=i, max_tokens=12, bad_words=[word]) for i, word in enumerate("aeth")]
    with caplog.at_level(logging.WARNING):
        llm, recorder = graph_llm(recorder=ClosureRecorder(fails_at={len(SIZES) + 1}), target=target)
        outputs = llm.generate(PROMPTS[:4], words, use_tqdm=False)
        num_masked = recorder.num_replayed
        llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    expected = tiny_llm(target=target).generate(PROMPTS[:4], words, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in outputs] == [one.outputs[0].token_ids for one in expected]
    assert recorder.num_replayed > num_masked
    assert len([one for one in caplog.records if "CUDA graphs" in one.message]) == 1


def test_a_device_that_is_lost_while_graphs_are_recorded_is_lost(monkeypatch):
    recorder = ClosureRecorder()
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(recorder, "record", lambda function: (_ for _ in ()).throw(lost))
    with pytest.raises(DeviceLostError):
        graph_llm(recorder=recorder)


@pytest.mark.parametrize(
    "config",
    [
        None,
        NGRAM,
        TREE,
        DYNAMIC_TREE,
        *(CASES[case] for case in ("eagle3", *AT_ONCE[1:], "peagle-dynamic-tree")),
        *(CASES[case] | {"draft_tree": [2, 2]} for case in AT_ONCE_TREES if case != "peagle-dynamic-tree"),
    ],
    ids=["plain", "ngram", "tree", "dynamic tree", "eagle3", *AT_ONCE[1:], *AT_ONCE_TREES[-1:], *AT_ONCE_TREES[:-1]],
)
def test_between_two_replays_the_host_reads_nothing_but_the_result(config):
    llm, recorder = graph_llm(config)
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **REPEATING)
    for i, prompt in enumerate(PROMPTS[:3]):
        llm.engine.add_request(str(i), prompt, sampling)
    for _ in range(6):
        llm.engine.step()
    before = recorder.num_replayed
    with HostReads() as reads:
        for _ in range(4):
            llm.engine.step()
    assert recorder.num_replayed == before + 4
    beside = {one for one in reads.readers if not one[0].startswith("forerun/ops/cuda/")}
    assert beside == {("forerun/executor/device_results.py", "unpack")}


def test_a_step_of_no_sequences_changes_nothing():
    llm, _ = graph_llm(NGRAM)
    llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    executor = llm.executor
    table = executor.slots.table
    before = [getattr(table, name).clone() for name in table.__dataclass_fields__]
    kept = [stack.clone() for stack in executor.cache.stacks]
    nobody = torch.empty((6, 0), dtype=torch.int32)
    executor.graphs.ready(nobody, None, num_rows=4, has_trees=True, drafts=True).replay()
    assert all(map(torch.equal, before, [getattr(table, name) for name in table.__dataclass_fields__]))
    assert all(map(torch.equal, kept, executor.cache.stacks))
