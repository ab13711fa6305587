"""A step is begun before the one before it was read, wherever the host has nothing to say in it; whatever goes wrong then is named."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from forerun import SamplingParams
from forerun.errors import WorkerError
from tests.contract.drafters import CASES
from tests.contract.test_contract import PROMPTS, TIGHT, assert_nothing_is_held
from tests.engines import EOS, tiny_llm, tiny_target
from tests.foreign import few_tokens
from tests.host_rows import host_rows_llm
from tests.server.test_engine_thread import PROMPT, running, submit

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NGRAM = CASES["ngram"] | {"draft_confidence_threshold": 0.0}
REPEATING = {"allowed_token_ids": [3, 4, 5]}


def late_llm(config=None, **settings):
    return tiny_llm(config, **({"device_step": True} | settings))


def noted(llm, monkeypatch):
    """The order in which steps are begun and read: (what, number)."""
    events, executor = [], llm.executor
    launch, read = executor._launch, executor._read

    def launching(plan, *args):
        events.append(("begun", plan.number))
        return launch(plan, *args)

    def reading(launched):
        events.append(("read", launched.plan.number))
        return read(launched)

    monkeypatch.setattr(executor, "_launch", launching)
    monkeypatch.setattr(executor, "_read", reading)
    return events


def tokens(llm, sampling, count=4):
    outputs = llm.generate(PROMPTS[:count], sampling, use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].finish_reason, one.outputs[0].text) for one in outputs]


TREE = CASES["eagle-tree"] | {"draft_tree": [2, 2], "draft_sample_method": "coupled"}
DYNAMIC_TREE = CASES["eagle3-dynamic-tree"]


@pytest.mark.parametrize(
    "config",
    [
        *(None, NGRAM, TREE, DYNAMIC_TREE),
        *(CASES[case] for case in ("eagle3", "pard", "dflash", "self-exit", "medusa", "mlp-speculator")),
    ],
    ids=["plain", "ngram", "tree", "dynamic tree", "eagle3", "pard", "dflash", "self", "medusa", "mlp-speculator"],
)
def test_nothing_is_read_before_the_next_step_is_begun(config, monkeypatch):
    llm = late_llm(config)
    events = noted(llm, monkeypatch)
    assert tokens(llm, GREEDY) == tokens(tiny_llm(), GREEDY)
    begun = [number for what, number in events if what == "begun"]
    assert len(begun) > 4
    # the first draft of a network with KV is the host's, which has it read the prompts
    with_kv = (CASES["eagle3"], CASES["pard"], CASES["dflash"], TREE, DYNAMIC_TREE)
    for number in begun[1 if config in with_kv else 0 : -1]:
        assert events.index(("begun", number + 1)) < events.index(("read", number))


def layout_of(step):
    """All of a settled step but the tokens of its rows, which nobody asks for."""
    rows, sequences = step.rows, [(one.start, one.num_tail, one.num_draft, one.reaches_end) for one in step.sequences]
    return sequences, step.drafts, rows.positions, rows.slots, rows.logits_rows, rows.first_rows, rows.first_logits


def test_steps_without_drafts_are_settled_as_if_their_rows_were_laid_out_again(monkeypatch):
    llm, compared = late_llm(), []
    settle_quickly = llm.executor._settle_computed

    def settled_twice(plan, states):
        found = settle_quickly(plan, states)
        is_quick = plan.is_pending and found.rows is plan.rows
        compared.append((is_quick, layout_of(found), layout_of(llm.executor._settle(plan, states))))
        return found

    monkeypatch.setattr(llm.executor, "_settle_computed", settled_twice)
    assert tokens(llm, GREEDY) == tokens(tiny_llm(), GREEDY)
    assert any(is_quick for is_quick, _, _ in compared)
    assert all(quickly == anew for _, quickly, anew in compared)


@pytest.mark.parametrize(
    ("config", "sampling"),
    [
        (CASES["suffix-tree"], GREEDY),
        (None, replace(GREEDY, logprobs=1)),
        (NGRAM, replace(GREEDY, prediction=[3, 4, 5])),
        (None, replace(GREEDY, bad_words=["a"])),
    ],
    ids=["host drafter", "logprobs", "prediction", "bad words"],
)
def test_what_the_host_must_know_is_read_first(config, sampling, monkeypatch):
    llm = tiny_llm(config, target=replace(tiny_target(), tokenizer=few_tokens()), device_step=True)
    events = noted(llm, monkeypatch)
    plain = tiny_llm(target=replace(tiny_target(), tokenizer=few_tokens()))
    assert tokens(llm, sampling) == tokens(plain, sampling)
    begun = [number for what, number in events if what == "begun"]
    assert len(begun) > 2
    for number in begun[1:-1]:  # the first is of prompts, after which nothing may be drafted yet
        assert events.index(("begun", number + 1)) > events.index(("read", number))


def caller():
    """The file and the function of forerun's that torch was called by."""
    frame = sys._getframe(1)
    while "/src/forerun/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_filename.rpartition("/src/")[2], frame.f_code.co_name


class HostReads(TorchFunctionMode):
    """Notes who takes a value from a tensor."""

    names = ("item", "tolist", "cpu", "numpy", "__int__", "__bool__", "__index__", "__float__", "nonzero")

    def __init__(self):
        super().__init__()
        self.readers = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in self.names:
            self.readers.add(caller())
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    "config",
    [
        None,
        NGRAM,
        TREE,
        DYNAMIC_TREE,
        *(CASES[case] for case in ("eagle3", "peagle", "dflash", "medusa", "mlp-speculator")),
    ],
    ids=["plain", "ngram", "tree", "dynamic tree", "eagle3", "peagle", "dflash", "medusa", "mlp-speculator"],
)
def test_in_the_steady_state_nothing_but_the_result_is_read(config):
    llm = late_llm(config)
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **REPEATING)
    for i, prompt in enumerate(PROMPTS[:3]):
        llm.engine.add_request(str(i), prompt, sampling)
    for _ in range(6):
        llm.engine.step()
    with HostReads() as reads:
        for _ in range(4):
            llm.engine.step()
    assert llm.engine.state.num_running == 3
    # the formulas, which stand for kernels, read what they compute with
    beside = {one for one in reads.readers if not one[0].startswith("forerun/ops/cuda/")}
    assert beside == {("forerun/executor/device_results.py", "unpack")}


class HostMade(TorchFunctionMode):
    """Notes who makes a tensor of the host's numbers, or one that lies where torch puts it unless it is told the device."""

    of_numbers = ("tensor", "as_tensor", "from_numpy", "asarray")
    of_shapes = ("empty", "zeros", "ones", "full", "arange", "eye", "linspace", "rand", "randn", "randint")

    def __init__(self):
        super().__init__()
        self.makers = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in self.of_numbers or (name in self.of_shapes and "device" not in (kwargs or {})):
            self.makers.add(caller())
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    "config",
    [
        None,
        NGRAM,
        TREE,
        DYNAMIC_TREE,
        *(CASES[case] for case in ("eagle3", "mtp", "peagle", "pard", "dflash", "medusa", "mlp-speculator")),
    ],
    ids=[
        "plain",
        "ngram",
        "tree",
        "dynamic tree",
        "eagle3",
        "mtp",
        "peagle",
        "pard",
        "dflash",
        "medusa",
        "mlp-speculator",
    ],
)
def test_what_the_device_computes_with_is_made_there(config, monkeypatch):
    """Numbers of the host would be copied, for which it waits, and which a CUDA graph cannot hold."""
    llm = late_llm(config)
    computation, made = llm.executor.computation, HostMade()
    run = computation.run

    def noted_run(*args, **options):
        with made:
            return run(*args, **options)

    monkeypatch.setattr(computation, "run", noted_run)
    sampling = [
        SamplingParams(seed=i, temperature=i % 2, max_tokens=12, top_p=0.9, presence_penalty=0.1 * (i == 3))
        for i in range(4)
    ]
    llm.generate(PROMPTS[:4], sampling, use_tqdm=False)
    # the formulas, which stand for kernels, compute with the host's numbers
    assert {one for one in made.makers if not one[0].startswith("forerun/ops/cuda/")} == set()


def test_a_text_that_the_device_has_ended_gets_no_row_though_the_host_does_not_know(monkeypatch):
    plain = tiny_llm().generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    stops = [one.outputs[0].token_ids[5] for one in plain]
    sampling = [replace(GREEDY, stop_token_ids=[stop], max_tokens=12) for stop in stops]
    llm = late_llm()
    rows, run = [], llm.executor.computation.run

    def noted_run(step, host, **kwargs):
        found = run(step, host, **kwargs)
        rows.append((len(step.rows.slots), int(step.rows.first_rows[-1])))
        return found

    monkeypatch.setattr(llm.executor.computation, "run", noted_run)
    expected = [
        (one.outputs[0].token_ids[: one.outputs[0].token_ids.index(stop) + 1], "stop", "")
        for one, stop in zip(plain, stops, strict=True)
    ]
    assert tokens(llm, sampling) == expected
    assert any(needed < planned for planned, needed in rows)
    assert rows[-1][1] < 4


@pytest.mark.parametrize("config", [None, NGRAM, CASES["suffix-tree"]], ids=["plain", "ngram", "host drafter"])
def test_stop_strings_several_completions_and_end_tokens_give_the_texts_of_the_host(config):
    sampling = [
        replace(SamplingParams(seed=i, max_tokens=16, temperature=i % 2, n=1 + i % 3), **settings)
        for i, settings in enumerate(
            [{"stop": ["e"]}, {"stop": ["a", "th"]}, {"min_tokens": 4}, {"stop_token_ids": [1, 2, 3, EOS]}, {}, {}] * 2
        )
    ]

    def outputs(**settings):
        llm = tiny_llm(config, target=replace(tiny_target(), tokenizer=few_tokens()), **TIGHT, **settings)
        given = llm.generate(PROMPTS[:12], sampling, use_tqdm=False)
        while llm.engine.has_work:
            llm.engine.step()
        assert_nothing_is_held(llm)
        return [(one.text, one.token_ids, one.finish_reason, one.stop_reason) for each in given for one in each.outputs]

    found = outputs(device_step=True)
    assert found == outputs()
    assert {reason for _, _, reason, _ in found} == {"stop", "length"}


def test_a_server_hands_out_the_same_texts():
    llm = late_llm(NGRAM)
    (expected,) = tiny_llm().generate([PROMPT], GREEDY, use_tqdm=False)

    async def run():
        async with running(llm) as engine:
            readers = [submit(engine, str(i), GREEDY, streams=i % 2 == 0) for i in range(6)]
            engine.abort(["5"])
            await asyncio.gather(*(reader.ended.wait() for reader in readers[:5]))
            return [reader.events[-1] for reader in readers[:5]]

    assert [one.outputs[0].token_ids for one in asyncio.run(run())] == [expected.outputs[0].token_ids] * 5


def failing(function, error, at):
    """`function`, whose calls from number `at` on, one or all of them, fail."""
    calls = []

    def call(*args, **kwargs):
        calls.append(1)
        if len(calls) in at:
            raise error
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("make", [host_rows_llm, late_llm], ids=["read first", "read late"])
def test_a_step_without_memory_ends_its_largest_request_and_no_others(make, monkeypatch):
    llm = make(NGRAM, device_step=True, max_num_seqs=2)
    computation = llm.executor.computation
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
    monkeypatch.setattr(computation, "forward", failing(computation.forward, error, at={4}))
    outputs = llm.generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    plain = tiny_llm().generate(PROMPTS[:4], GREEDY, use_tqdm=False)
    [failed] = [i for i, one in enumerate(outputs) if one.error is not None]
    assert failed < 2
    assert "memory" in outputs[failed].error
    assert "max_num_seqs" in outputs[failed].error
    assert outputs[failed].outputs[0].finish_reason == "error"
    for i, (one, expected) in enumerate(zip(outputs, plain, strict=True)):
        assert i == failed or one.outputs[0].token_ids == expected.outputs[0].token_ids
    assert_nothing_is_held(llm)


def test_logits_that_are_not_numbers_are_named_though_they_are_read_late(monkeypatch):
    llm = late_llm()
    computation = llm.executor.computation
    forward, calls = computation.forward, []

    def spoiled(batch, attend):
        result = forward(batch, attend)
        calls.append(1)
        if len(calls) == 4:
            result.logits[1, 3] = torch.nan
        return result

    monkeypatch.setattr(computation, "forward", spoiled)
    outputs = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    plain = tiny_llm().generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    assert "largest is nan" in outputs[1].error
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [plain[i].outputs[0].token_ids for i in (0, 2)]
    assert_nothing_is_held(llm)


def test_a_device_that_is_lost_is_told_of_from_then_on(monkeypatch):
    llm = late_llm()
    llm.engine.check_health()
    computation = llm.executor.computation
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore lines")
    monkeypatch.setattr(computation, "forward", failing(computation.forward, error, at={3}))
    with pytest.raises(
        WorkerError, match=r"it computes no more \(CUDA error: an illegal memory access was encountered\)"
    ):
        llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    with pytest.raises(WorkerError, match="it computes no more"):
        llm.engine.check_health()


def test_a_result_that_cannot_be_read_is_computed_again(monkeypatch):
    """Nothing of it, nor of the step that was begun after it, is in the texts."""
    llm = late_llm(NGRAM)
    expected = [one for one, _, _ in tokens(tiny_llm(), GREEDY)]
    for i, prompt in enumerate(PROMPTS[:4]):
        llm.engine.add_request(str(i), prompt, GREEDY)
    monkeypatch.setattr(llm.executor, "_read", failing(llm.executor._read, RuntimeError("unreadable"), at={3, 6}))
    finished, num_failures = {}, 0
    while llm.engine.has_work:
        try:
            finished |= {output.request_id: output.outputs[0].token_ids for output in llm.engine.step().finished}
        except RuntimeError:
            num_failures += 1
    assert num_failures == 2
    assert [finished[str(i)] for i in range(4)] == expected
    assert_nothing_is_held(llm)


def test_times_say_what_the_host_did_and_what_it_waited_for():
    llm = late_llm(NGRAM)
    tokens(llm, GREEDY)
    times = llm.stats.times
    assert min(times.schedule, times.build, times.forward, times.verify, times.commit) > 0
    assert times.wait < times.forward
    assert times.idle == 0  # there is no device that could be
