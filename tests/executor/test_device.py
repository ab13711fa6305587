"""With device_step=True texts, rules and drafts lie in tables; by formula on the CPU, the text is the ordinary engine's."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from forerun import LLM, SamplingParams
from forerun.bench.passes import PassShape, random_sequences
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import resolve_speculative
from forerun.core.draft import Draft
from forerun.core.sampling_params import LARGEST_BIAS, SCALARS
from forerun.core.sequence import Sequence
from forerun.core.step import SequenceSpec
from forerun.drafters.ngram import NgramDrafter
from forerun.errors import ConfigError, RequestError
from forerun.executor import local
from forerun.executor.device import DeviceExecutor
from forerun.executor.device_computation import DeviceFunctions
from forerun.executor.device_slots import DeviceSlots
from forerun.executor.host_copies import as_current
from forerun.models.loader import load_model
from forerun.ops.cuda import steps
from tests.contract.drafters import CASES, oracle, usually
from tests.contract.test_contract import GREEDY, PROMPTS, TIGHT, assert_nothing_is_held
from tests.engine.test_engine_machine import TINY, EngineMachine, configs, limits, run_machine
from tests.engine.test_interrupts import interrupting
from tests.engines import VOCAB_SIZE, tiny_drafter, tiny_llm, tiny_target
from tests.foreign import few_tokens
from tests.host_rows import host_rows_llm
from tests.step_recorder import ClosureRecorder

SAMPLING = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 1.2, "logit_bias": {3: 2.0, 4: -3.0}, "min_tokens": 6, "stop_token_ids": [1, 2, 3]},
    {"temperature": 0.7, "allowed_token_ids": [*range(1, 60, 3)], "presence_penalty": 0.8},
]


def requests(count):
    """Requests of every kind in turn; log probabilities are read before another step is begun."""
    return [
        SamplingParams(seed=2**63 + i, max_tokens=14, logprobs=1, **SAMPLING[i % len(SAMPLING)]) for i in range(count)
    ]


def texts(llm, count, **changes):
    sampling = [replace(one, **changes) for one in requests(count)]
    outputs = llm.generate(PROMPTS[:count], sampling, use_tqdm=False)
    return [(one.outputs[0].token_ids, one.outputs[0].finish_reason) for one in outputs]


@pytest.fixture(scope="module")
def plain_texts():
    return texts(tiny_llm(enable_prefix_caching=False), 20)


@pytest.mark.parametrize("case", usually(CASES))
def test_texts_equal_plain_decoding_by_the_host(case, plain_texts):
    """Results are read late, wherever the drafter lets them be; see also `tests/slow/test_device_contract.py`."""
    llm = tiny_llm(CASES[case], device_step=True, **TIGHT | {"num_gpu_blocks_override": 33})
    count = 20 if case in ("plain", "ngram") else 6
    assert texts(llm, count, logprobs=None) == plain_texts[:count]
    assert_nothing_is_held(llm)
    assert llm.executor.slots.num_free == TIGHT["max_num_seqs"]


@pytest.mark.parametrize("case", ["plain", "ngram", "suffix-tree", "eagle3"])
def test_texts_are_the_same_where_log_probabilities_are_read_first(case, plain_texts):
    llm = tiny_llm(CASES[case], device_step=True, **TIGHT | {"num_gpu_blocks_override": 33})
    assert texts(llm, 6) == plain_texts[:6]


@pytest.mark.parametrize("case", ["plain", "ngram", "suffix-tree", "random-tree", "medusa"])
def test_texts_are_the_same_where_the_host_must_know_each_row(case, plain_texts):
    llm = host_rows_llm(CASES[case], **TIGHT | {"num_gpu_blocks_override": 33})
    assert texts(llm, 6) == plain_texts[:6]
    assert llm.executor.computation.needs_host_rows
    assert_nothing_is_held(llm)


def test_trees_that_are_mostly_right_give_the_text_of_plain_decoding(plain_texts):
    answers = {tuple(prompt): ids for prompt, (ids, _) in zip(PROMPTS, plain_texts, strict=False)}
    llm = tiny_llm({"method": oracle(answers, wrong_every=5), "num_speculative_tokens": 9}, device_step=True)
    assert texts(llm, 20) == plain_texts
    assert llm.stats.speculation.num_accepted_tokens > 50


def test_the_kv_of_an_accepted_path_lies_where_that_of_its_text_does(plain_texts):
    """Even where nothing of it is computed again: keys, values and features are those of plain decoding."""
    prompt, (token_ids, _) = PROMPTS[0], plain_texts[0]
    trees = {"method": oracle({tuple(prompt): token_ids}, wrong_every=5), "num_speculative_tokens": 9}
    kept = []
    for config in (None, trees):
        llm = tiny_llm(config, device_step=True, enable_prefix_caching=False)
        llm.generate([prompt], requests(1)[0], use_tqdm=False)
        taken = llm.executor.cache.read(torch.arange(4 * (-(-(len(prompt) + len(token_ids)) // 4))))
        kept.append([stack[:, : len(prompt) + len(token_ids) - 1] for stack in taken])
    for plain, moved in zip(*kept, strict=True):
        torch.testing.assert_close(moved, plain)


class DeviceMachine(EngineMachine):
    """The engine's random machine over a `DeviceExecutor`."""

    @initialize(
        config=configs,
        limit=limits,
        caching=st.booleans(),
        delay=st.sampled_from([0, 1]),
        is_recorded=st.booleans(),
    )
    def start(self, config, limit, caching, delay, is_recorded):
        self.settings = {"device_step": True}
        super().start(config=config, limit=limit, caching=caching, delay=delay)
        if is_recorded:
            self.llm.executor.use_graphs([1, 2, 4, 8, 12], ClosureRecorder())

    def sampling_of(self, option):
        return SamplingParams(**{name: value for name, value in option.items() if name != "logits_processors"})


def test_whatever_happens_each_request_gives_what_it_gives_alone():
    run_machine(DeviceMachine, examples=5, steps=12)


SEAMS = {
    "while placing": lambda executor: (executor.slots, "place_blocks"),
    "before the device has committed": lambda executor: (executor.computation, "_judge"),
    "before the drafts are known": lambda executor: (executor.computation, "run"),
    "before the step is": lambda executor: (executor, "_launch"),
    "before the result is handed out": lambda executor: (executor, "_execute_late"),
    "while waiting": lambda executor: (executor, "_results"),
    "while committing": lambda executor: (executor, "commit"),
    "while drafting": lambda executor: (executor, "draft"),
    "before it is known to be read": lambda executor: (executor, "_read"),
}


@pytest.mark.parametrize("seam", SEAMS.values(), ids=SEAMS)
@pytest.mark.parametrize("make", [host_rows_llm, tiny_llm], ids=["read first", "read late"])
@pytest.mark.parametrize(
    "case",
    ["ngram", "suffix-tree", *(pytest.param(name, marks=pytest.mark.slow) for name in ("draft-model", "eagle-tree"))],
)
def test_stepping_on_after_an_interrupt_gives_the_same_texts(seam, make, case, plain_texts, monkeypatch):
    """Also where the device has committed, and drafted, what the host never read."""
    llm = make(CASES[case], device_step=True, **TIGHT)
    for i, (prompt, sampling) in enumerate(zip(PROMPTS[:4], requests(4), strict=True)):
        llm.engine.add_request(str(i), prompt, replace(sampling, logprobs=None))
    place, name = seam(llm.executor)
    monkeypatch.setattr(place, name, interrupting(getattr(place, name), 5, before=False))
    finished, num_interrupts = {}, 0
    while llm.engine.has_work:
        try:
            finished |= {output.request_id: output.outputs[0] for output in llm.engine.step().finished}
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 1
    assert [(finished[str(i)].token_ids, finished[str(i)].finish_reason) for i in range(4)] == plain_texts[:4]
    assert_nothing_is_held(llm)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"logits_processors": [lambda _, logits: logits]}, "logits_processors"),
        ({"logit_bias": dict.fromkeys(range(321), 1.0)}, "logit_bias"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
    ],
)
def test_rules_that_have_no_room_on_the_device_are_refused_by_name(setting, name):
    llm = tiny_llm(device_step=True, **TINY)
    with pytest.raises(RequestError, match=f"{name}: .*device_step"):
        llm.generate([[1, 2]], SamplingParams(**setting), use_tqdm=False)


LARGEST = [
    *({"temperature": 1e6}, {"top_p": 1.0}, {"top_k": 2**70}, {"min_p": 1.0}, {"presence_penalty": 2.0}),
    *({"frequency_penalty": 2.0}, {"repetition_penalty": 1e6}, {"min_tokens": 2**70, "max_tokens": None}),
    *({"max_tokens": 2**70}, {"seed": 2**70}, {"logprobs": VOCAB_SIZE}, {"prompt_logprobs": VOCAB_SIZE}),
]


def test_the_largest_numbers_of_a_request_give_the_text_of_the_host_and_cost_no_other_request_its_own():
    assert set().union(*LARGEST) == set(SCALARS) - {"n"}, "which makes more sequences, none of larger numbers"
    common = {"seed": 1, "max_tokens": 6, "stop_token_ids": [40, 79]}
    sampling = [SamplingParams(**common | largest) for largest in ({}, *LARGEST)]
    by_host, by_device = (
        tiny_llm(CASES["ngram"], device_step=device_step).generate(
            [PROMPTS[0]] * len(sampling), sampling, use_tqdm=False
        )
        for device_step in (False, True)
    )
    for host, device in zip(by_host, by_device, strict=True):
        assert device.error is None
        assert device.outputs[0].token_ids == host.outputs[0].token_ids
        assert device.outputs[0].finish_reason == host.outputs[0].finish_reason


@pytest.mark.parametrize("device_step", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_largest_bias_under_the_least_penalty_is_a_number_like_any_other(device_step, temperature):
    sampling = SamplingParams(
        logit_bias={3: LARGEST_BIAS}, repetition_penalty=1e-6, temperature=temperature, max_tokens=4
    )
    (output,) = tiny_llm(CASES["ngram"], device_step=device_step).generate([[1, 2, 3]], sampling, use_tqdm=False)
    assert output.error is None
    assert output.outputs[0].token_ids == [3, 3, 3, 3]


def test_another_verifier_is_refused():
    with pytest.raises(ConfigError, match=r"rejection_sample_method: .*device_step"):
        tiny_llm(CASES["ngram"] | {"rejection_sample_method": "standard"}, device_step=True)


def test_a_cache_in_several_processes_is_refused():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: got 2; with device_step=True it must be 1"):
        EngineSettings(model="tiny", device_step=True, tensor_parallel_size=2)


def test_a_gpu_without_triton_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "forerun.ops.cuda.kernels", None)
    with pytest.raises(ConfigError, match=r"device_step: .*forerun\[cuda\]"):
        DeviceFunctions.choose(torch.device("cuda"))


def test_a_switch_is_true_or_false():
    with pytest.raises(ConfigError, match="device_step: got 'yes'; may be True, False or None"):
        tiny_llm(device_step="yes")


@pytest.mark.parametrize(("logit", "says"), [(torch.nan, "largest is nan"), (torch.inf, "largest is inf")])
def test_logits_that_are_not_finite_end_their_request_alone(logit, says, monkeypatch):
    llm = tiny_llm(device_step=True, **TINY)
    assert isinstance(llm.executor, DeviceExecutor)
    forward = llm.executor.computation.forward

    def spoiled(batch, attend):
        result = forward(batch, attend)
        logits = result.logits.clone()
        logits[-1, 3] = logit
        return replace(result, logits=logits)

    monkeypatch.setattr(llm.executor.computation, "forward", spoiled)
    good, bad = llm.generate([[1, 2], [3, 4]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert good.error is None
    assert says in bad.error


def test_ngrams_are_drafted_on_the_device_as_the_host_drafts_them(monkeypatch):
    config = CASES["ngram"] | {"draft_confidence_threshold": 0.0}
    few = {"allowed_token_ids": [3, 4, 5]}  # so that texts repeat themselves
    sampling = [replace(GREEDY, seed=seed, temperature=seed % 2, **few) for seed in range(8)]

    def speculation(**settings):
        llm = tiny_llm(config, verifies_all=True, **settings)
        outputs = llm.generate(PROMPTS[:8], sampling, use_tqdm=False)
        return [one.outputs[0].origins for one in outputs], llm.stats.speculation

    expected = speculation()
    assert expected[1].num_accepted_tokens > 20
    monkeypatch.setattr(NgramDrafter, "start", None)
    monkeypatch.setattr(NgramDrafter, "propose", None)
    assert speculation(device_step=True) == expected


METHODS = ("draft_model", "pard", "eagle", "eagle3", "peagle", "dflash", "self", "mtp", "medusa", "mlp_speculator")
COMPUTING = [name for name, case in CASES.items() if case and case["method"] in METHODS]
CHAINS = [
    *("draft-model", "draft-model-coupled", "eagle", "eagle3", "mtp", "self-exit"),
    *("pard", "peagle", "dflash", "dflash-coupled", "medusa", "mlp-speculator"),
]
KEEPS_NO_KV = ["self-exit", "medusa", "mlp-speculator"]  # of its own: nothing is unread
TREES = ["draft-model-tree", "eagle-tree", "draft-model-dynamic-tree", "eagle3-dynamic-tree"]
WITH_RULES = [
    "draft-model-coupled",
    "draft-model-tree",
    "eagle3",
    "dflash-coupled",
    "medusa",
]  # of `requests`, beside the others


@pytest.mark.parametrize("case", usually(COMPUTING, chosen={*COMPUTING} - {*CHAINS, *TREES} | {*WITH_RULES}))
def test_drafters_that_compute_draft_the_same_as_in_torch(case):
    def outcome(**settings):
        llm = tiny_llm(CASES[case], verifies_all=True, max_num_seqs=3, **settings)
        outputs = llm.generate(PROMPTS[:4], requests(4), use_tqdm=False)
        return [(one.outputs[0].token_ids, one.outputs[0].origins) for one in outputs], llm.stats.speculation

    expected = outcome()
    assert expected[1].num_draft_tokens > 20
    assert outcome(device_step=True) == expected


@pytest.mark.parametrize("case", [*CHAINS, *TREES])
def test_the_device_drafts_and_the_host_only_what_was_not_read_yet(case, monkeypatch):
    """A sequence's first draft is the host's, since the drafter reads the whole prompt for it."""
    llm = tiny_llm(CASES[case], device_step=True, verifies_all=True)
    drafter = llm.executor.drafting.drafter
    by_host, propose = [], drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda context: by_host.append(len(context.requests)) or propose(context))
    sampling = [SamplingParams(seed=i, temperature=i % 2, max_tokens=14) for i in range(4)]
    outputs = llm.generate([[7, 8, 9], [3, 4], [5], [1, 2, 6]], sampling, use_tqdm=False)
    assert llm.stats.speculation.num_draft_tokens > 4 * 3
    assert sum(by_host) == (0 if case in KEEPS_NO_KV else 4)
    host = tiny_llm(CASES[case], verifies_all=True)
    expected = host.generate([[7, 8, 9], [3, 4], [5], [1, 2, 6]], sampling, use_tqdm=False)
    assert [one.outputs[0].origins for one in outputs] == [one.outputs[0].origins for one in expected]
    assert llm.stats.speculation == host.stats.speculation


@pytest.mark.parametrize("case", ["eagle3", "draft-model-coupled", "dflash", "dflash-coupled"])
def test_requests_whose_rules_change_logits_are_drafted_for_by_the_host_where_that_matters(case):
    llm = tiny_llm(CASES[case], device_step=True, verifies_all=True, **TINY)
    chains, asked = llm.executor.computation.chains, []
    may_draft = chains.may_draft
    chains.may_draft = lambda request, **options: asked.append(may_draft(request, **options)) or asked[-1]
    sampling = SamplingParams(temperature=0.9, presence_penalty=0.5, seed=1, max_tokens=12)
    llm.generate([[7, 8, 9]], sampling, use_tqdm=False)
    assert any(asked) == ("coupled" not in case)  # the likeliest tokens are drafted whatever the rules


def test_a_pass_outside_of_a_step_attends_by_its_own_batch():
    found = []
    for device_step in (True, False):
        llm = tiny_llm(device_step=device_step)
        llm.generate([[7, 8, 9]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        shape = PassShape(context=6, num_sequences=2, rows=3)
        with random_sequences(llm, [shape]) as sequences:
            found.append(sequences.forward(sequences.batch(shape)))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_a_drafter_that_fails_on_the_device_costs_drafts_alone(plain_texts, monkeypatch, caplog):
    llm = tiny_llm(CASES["eagle3"], device_step=True)
    assert llm.executor.computation.chains is not None
    monkeypatch.setattr(llm.executor.computation.chains, "propose", None)
    assert texts(llm, 4) == plain_texts[:4]
    assert llm.executor.computation.chains is None
    assert caplog.text.count("drafting on the device failed") == 1


@pytest.mark.parametrize("case", ["hybrid", "draft-model-foreign"])
def test_other_writers_are_the_hosts(case):
    assert tiny_llm(CASES[case], device_step=True, **TINY).executor.computation.chains is None


@pytest.mark.parametrize("case", ["draft-model", "eagle-tree", "random-tree"])
def test_in_bf16_drafts_change_no_text(case):
    """Where most rows round otherwise than in fp32: each has its own bits, whatever is computed beside it."""
    model = load_model(tiny_drafter(VOCAB_SIZE, 0.0), dtype=torch.bfloat16, device=torch.device("cpu"))
    target = replace(tiny_target(), model=model)
    plain, drafted = (tiny_llm(config, target=target, device_step=True, **TIGHT) for config in (None, CASES[case]))
    assert drafted.is_batch_invariant
    assert texts(drafted, 8) == texts(plain, 8)
    assert drafted.stats.speculation.num_draft_tokens > 50


@pytest.mark.parametrize(("device_step", "method"), [(True, "auto"), (None, "none")])
def test_auto_drafts_by_default_where_no_draft_can_change_a_bit(device_step, method):
    speculative = resolve_speculative("default", None)
    settings = EngineSettings(model="tiny", device_step=device_step, max_model_len=128, num_gpu_blocks_override=64)
    llm = LLM.from_target(tiny_target(), settings, speculative)
    assert llm.speculative.method == method
    assert llm.has_device_layers == bool(device_step)


def test_auto_looks_up_on_the_device_which_waits_for_no_draft_of_the_host(plain_texts):
    llm = tiny_llm({"method": "auto"}, device_step=True, **TIGHT)
    assert llm.executor.computation.ngrams is not None
    assert [choice.method for choice in llm.drafter_choices() if choice.is_used] == ["ngram"]
    assert texts(llm, 8) == plain_texts[:8]
    assert llm.stats.speculation.by_drafter["ngram"].num_accepted_tokens > 0
    assert_nothing_is_held(llm)


def test_a_drafter_that_auto_is_given_drafts_on_the_host():
    llm = tiny_llm({"method": "auto", "drafter": {"method": "draft_model", "model": "tiny"}}, device_step=True, **TINY)
    assert llm.executor.computation.ngrams is None
    assert {choice.method for choice in llm.drafter_choices() if choice.is_used} >= {"copy", "draft_model"}


@pytest.mark.parametrize("case", ["plain", "ngram", "suffix-tree", "eagle3"])
def test_products_by_torch_give_the_same_texts_in_fp32(case, plain_texts):
    llm = tiny_llm(CASES[case], device_step=True, device_matmul="torch", **TIGHT | {"num_gpu_blocks_override": 33})
    assert texts(llm, 6) == plain_texts[:6]
    assert_nothing_is_held(llm)


def test_where_torch_multiplies_nothing_is_drafted_by_default():
    speculative = resolve_speculative("default", None)
    settings = EngineSettings(
        model="tiny", device_step=True, device_matmul="torch", max_model_len=128, num_gpu_blocks_override=64
    )
    llm = LLM.from_target(tiny_target(), settings, speculative)
    assert llm.has_device_layers
    assert not llm.is_batch_invariant
    assert llm.speculative.method == "none"


def test_who_multiplies_is_refused_where_it_has_no_meaning():
    with pytest.raises(ConfigError, match=r"device_matmul: got 'torch', but the steps are not computed on the device"):
        tiny_llm(device_matmul="torch")
    with pytest.raises(ConfigError, match="device_matmul: got 'cublas'; may be kernels, torch"):
        tiny_llm(device_step=True, device_matmul="cublas")


def slots_of(num_slots):
    return DeviceSlots(
        num_slots,
        max_length=16,
        block_size=4,
        most_drafted=2,
        vocab_size=VOCAB_SIZE,
        device=torch.device("cpu"),
    )


def sequence(seq_id, output_ids=()):
    sampling = SamplingParams()
    prompt_ids = [seq_id, seq_id + 1]
    return (
        Sequence(seq_id=seq_id, prompt_ids=prompt_ids, output_ids=list(output_ids), sampling=sampling, seed=1),
        SequenceSpec(seq_id=seq_id, prompt_ids=prompt_ids, sampling=sampling, seed=1, max_length=16),
    )


def test_a_sequence_that_waits_loses_its_slot_and_gets_another_with_its_whole_text():
    slots, first, second, third = slots_of(2), sequence(1), sequence(2), sequence(3)
    slots.take([first, second])
    [taken_by_third] = slots.take([third])
    first[0].output_ids.append(9)
    again, _ = slots.take([first, third])
    assert again != taken_by_third
    assert slots.table.tokens[again, :3].tolist() == [1, 2, 9]
    assert slots.rules.counts[again].nonzero().flatten().tolist() == [9]
    slots.release(1)
    slots.release(2)
    slots.release(3)
    assert slots.num_free == 2


def test_a_text_that_the_device_may_have_changed_alone_is_written_again():
    slots, one = slots_of(1), sequence(1, [7])
    [slot] = slots.take([one])
    slots.forget_texts([1])
    slots.table.tokens[slot] = 0
    slots.take([one])
    assert slots.table.tokens[slot, :3].tolist() == [1, 2, 7]


def test_a_draft_that_the_table_holds_is_not_sent_again_even_where_the_plan_cuts_it():
    slots, one = slots_of(1), sequence(1, [7])
    slots.take([one])
    [holder] = slots.forget_texts([1])
    slots.trust_texts([holder])
    slots.know_text(holder, num_computed=2, draft=Draft((5, 6)))
    for sent, found in (((5, 6), 0), ((5,), 0), ((), 0), ((5, 4), 2), ((5,), 2)):
        slots.place(1, start=2, draft=Draft(sent))
        tell(slots)
        assert slots.table.draft_sizes[0] == found
    assert slots.table.draft_tokens[0].tolist() == [5, 4]


def tell(slots):
    """Have the device write what the host has noted."""
    steps.place(torch.from_numpy(np.ascontiguousarray(slots.changes())), slots.table)
    slots.changes_are_sent()


def test_blocks_that_the_table_holds_are_not_sent_again():
    slots, one = slots_of(1), sequence(1, [7])
    slots.take([one])
    for blocks, num_changes in (([3], 1), ([3], 0), ([3, 9], 1), ([4, 9], 1), ([4, 9, 2], 1)):
        slots.place_blocks(1, np.array(blocks, dtype=np.int32))
        assert slots.changes().shape == (4, num_changes)
        tell(slots)
        assert slots.table.block_table[0, : len(blocks)].tolist() == blocks


def test_what_was_noted_of_who_had_a_slot_before_is_not_sent():
    slots = slots_of(1)
    slots.take([sequence(1, [7])])
    slots.place_blocks(1, np.array([3, 9], dtype=np.int32))
    slots.place(1, start=2, draft=Draft((5, 6)))
    slots.release(1)
    slots.take([sequence(2, [8])])
    slots.place_blocks(2, np.array([6], dtype=np.int32))
    tell(slots)
    assert slots.table.block_table[0, :2].tolist() == [6, 0]
    assert slots.table.draft_sizes[0] == 0


@pytest.mark.parametrize("min_tokens", [6, 7, 8])
def test_a_stop_string_within_accepted_tokens_costs_no_other_request_its_log_probabilities(min_tokens):
    """The next step was begun before the text was cut, with rows that follow the longer one."""
    target = replace(tiny_target(), tokenizer=few_tokens())
    (letter,) = target.tokenizer.encode("b", add_special_tokens=False)
    prompt, sampling = PROMPTS[1], replace(GREEDY, max_tokens=6, logprobs=1)
    (alone,) = tiny_llm(target=target).generate([prompt], sampling, use_tqdm=False)
    llm = tiny_llm(
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        target=target,
        device_step=True,
        verifies_all=True,
    )
    # Of ten letters those from the sixth to the ninth are accepted in one step, after which there is no room for a draft.
    repeated = SamplingParams(
        temperature=0, max_tokens=10, min_tokens=min_tokens, stop=["b"], allowed_token_ids=[letter]
    )
    llm.engine.add_request("repeated", [letter] * 3, repeated)
    for _ in range(3):
        llm.engine.step()
    llm.engine.add_request("other", prompt, sampling)
    ended = {}
    while llm.engine.has_work:
        ended |= {one.request_id: one.outputs[0] for one in llm.engine.step().finished}
    assert len(ended["repeated"].token_ids) == min_tokens
    assert ended["other"].token_ids == alone.outputs[0].token_ids
    for found, expected in zip(ended["other"].logprobs, alone.outputs[0].logprobs, strict=True):
        assert found.keys() == expected.keys()
        for token_id, one in found.items():
            assert one.logprob == pytest.approx(expected[token_id].logprob, abs=1e-4)


def test_the_logits_of_a_step_are_not_kept_when_its_log_probabilities_were_read(monkeypatch):
    """Of a long prompt they are most of a step's memory, and the next step needs as much."""
    llm = tiny_llm(device_step=True)
    launch, begun, kept = llm.executor._launch, [], []

    def watched(*args):
        kept.extend(before.outputs for before in begun if before.result is not None)
        begun.append(launch(*args))
        return begun[-1]

    monkeypatch.setattr(llm.executor, "_launch", watched)
    llm.generate(PROMPTS[:2], replace(GREEDY, max_tokens=4, logprobs=1, prompt_logprobs=1), use_tqdm=False)
    assert len(kept) > 3
    assert all(outputs.logits is None and outputs.candidates is None for outputs in kept)


def test_steps_are_computed_with_their_gpu_as_the_threads_current_one(monkeypatch):
    seen = []
    monkeypatch.setattr(local, "as_current", lambda device: seen.append(device) or nullcontext())
    llm = tiny_llm(device_step=True, **TINY)
    llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)  # as a whole
    in_a_whole = len(seen)
    llm.engine.add_request("one", PROMPTS[0], GREEDY)
    llm.engine.step()
    assert in_a_whole > 0
    assert len(seen) > in_a_whole
    assert set(seen) == {torch.device("cpu")}
    assert isinstance(as_current(torch.device("cuda:1")), torch.cuda.device)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_all_that_the_host_sends_begins_at_sixteen_bytes_however_many_sequences_there_are(is_recorded):
    """triton compiles a kernel again for arguments that do not, which would halt an engine that runs."""
    llm = tiny_llm(CASES["ngram"], device_step=True, max_num_seqs=7)
    computation, sent, counts = llm.executor.computation, [], set()
    compute = computation.compute
    computation.compute = compute._replace(
        place=lambda changes, table: sent.append(changes) or compute.place(changes, table),
        prepare=lambda plan, *rest, **options: (
            sent.extend((plan.slots, plan.tails, plan.most_drafted, plan.ends))
            or counts.add(len(plan.slots))
            or compute.prepare(plan, *rest, **options)
        ),
    )
    if is_recorded:
        llm.executor.use_graphs([1, 2, 4, 8, 64], ClosureRecorder())
    sampling = [SamplingParams(temperature=0, max_tokens=3 * i, ignore_eos=True) for i in range(1, 8)]
    llm.generate(PROMPTS[:7], sampling, use_tqdm=False)
    assert counts >= ({1, 2, 4, 7} if is_recorded else {1, 2, 3, 4, 5, 6, 7})
    assert {tensor.storage_offset() * tensor.itemsize % 16 for tensor in sent} == {0}
