"""Trees that the device drafts are those that the host drafts after the same texts, node by node."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forerun import SamplingParams
from forerun.drafters.neural import device_trees
from tests.contract.drafters import CASES
from tests.contract.test_contract import PROMPTS, TIGHT, assert_nothing_is_held
from tests.engines import VOCAB_SIZE, tiny_drafter, tiny_llm

LOPSIDED = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0, 0]]
RUNNERS_UP = [[0], [1], [2], [0, 0], [0, 1], [0, 2]]
TREES = {
    "draft model": CASES["draft-model-tree"],
    "eagle": CASES["eagle-tree"],
    "eagle, lopsided": CASES["eagle-tree"] | {"draft_tree": LOPSIDED},
    "eagle3, runners-up": {"method": "eagle3", "model": "tiny-eagle3", "draft_tree": RUNNERS_UP},
    "mtp": {"method": "mtp", "draft_tree": [2, 2, 1]},
    "self": {"method": "self", "exit_layer": 2, "draft_tree": LOPSIDED},
    "mlp speculator": CASES["mlp-speculator-tree"],
    "mlp speculator, runners-up": CASES["mlp-speculator-tree"] | {"draft_tree": RUNNERS_UP},
    "pard": CASES["pard-tree"],
    "peagle, runners-up": {"method": "peagle", "model": "tiny-peagle", "draft_tree": RUNNERS_UP},
    "medusa, lopsided": CASES["medusa-tree"] | {"draft_tree": LOPSIDED},
    "dflash, lopsided": CASES["dflash-tree"] | {"draft_tree": LOPSIDED},
}
DYNAMIC = {
    "draft model": CASES["draft-model-dynamic-tree"],
    "eagle3, few candidates": CASES["eagle3-dynamic-tree"],
    "self, more nodes than candidates": {
        "method": "self",
        "exit_layer": 2,
        "draft_tree": {"top_k": 2, "depth": 3},
        "num_speculative_tokens": 16,
    },
    "self, one level": {
        "method": "self",
        "exit_layer": 2,
        "draft_tree": {"top_k": 5, "depth": 1},
        "num_speculative_tokens": 4,
    },
    "mtp, as wide as its vocabulary": {
        "method": "mtp",
        "draft_tree": {"top_k": 97, "depth": 1},
        "num_speculative_tokens": 12,
    },
    "mlp speculator": CASES["mlp-speculator-tree"]
    | {"draft_tree": {"top_k": 3, "depth": 4}, "num_speculative_tokens": 9},
    "peagle": CASES["peagle-dynamic-tree"],
    "medusa": CASES["medusa-dynamic-tree"],
    "dflash, more nodes than candidates": CASES["dflash-tree"]
    | {"draft_tree": {"top_k": 2, "depth": 3}, "num_speculative_tokens": 16},
    "pard, as wide as its vocabulary": CASES["pard-tree"]
    | {"draft_tree": {"top_k": 97, "depth": 2}, "num_speculative_tokens": 20},
}
AT_ONCE = {"method": "medusa", "model": "tiny-medusa"}, {"method": "pard", "model": "tiny-pard"}
"""Drafters that predict all tokens in one pass, up to four of them."""
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=14),
    SamplingParams(temperature=0.9, seed=1, max_tokens=14),
    SamplingParams(temperature=0.7, seed=2, max_tokens=9, top_k=2),  # fewer tokens than a node has children
    SamplingParams(temperature=1.0, seed=3, max_tokens=14, top_p=0.6, min_p=0.02),
    SamplingParams(temperature=0, max_tokens=14, speculation={"num_speculative_tokens": 4}),
    SamplingParams(temperature=1.0, seed=4, max_tokens=14, speculation={"num_speculative_tokens": 1}),
]


class Seen:
    """What an executor gave in a step, noted when it is read."""

    def __init__(self, plan, pending, executor, drafts):
        self._plan, self._pending, self._executor, self._drafts = plan, pending, executor, drafts

    def result(self):
        result = self._pending.result()
        for planned, one in zip(self._plan.sequences, result.sequences, strict=True):
            if one.draft.token_ids:
                draft, sequence = one.draft, self._executor._states[planned.seq_id].sequence
                nodes = [(token_id, draft.parent(node)) for node, token_id in enumerate(draft.token_ids)]
                self._drafts[sequence.seq_id, tuple(sequence.tokens_from(0))] = nodes
        return result


def drafts_of(config, sampling, **settings):
    """The drafts after each text that prompts come to, as (token, parent) of each node; and the engine."""
    llm, drafts = tiny_llm(config, verifies_all=True, **settings), {}
    execute = llm.executor.execute
    llm.executor.execute = lambda plan: Seen(plan, execute(plan), llm.executor, drafts)
    llm.generate(PROMPTS[: len(sampling)], sampling, use_tqdm=False)
    return drafts, llm


def assert_same_drafts(config, sampling, **settings):
    """Whoever drafts; returns the device's drafts, and its engine."""
    expected, _ = drafts_of(config, sampling, **settings)
    found, llm = drafts_of(config, sampling, device_step=True, **settings)
    assert found == expected
    assert llm.executor.computation.drafts_trees
    assert_nothing_is_held(llm)
    return found, llm


ONE_PASS = {
    "pard": "coupled",
    "peagle, runners-up": "coupled",
    "medusa, lopsided": "greedy",
    "dflash, lopsided": "greedy",
}
"""How these draw; `test_device.py` has more trees of theirs, drawn both ways."""


@pytest.mark.parametrize(
    ("case", "method"),
    [
        pytest.param(case, method, marks=() if ONE_PASS.get(case, method) == method else pytest.mark.slow)
        for case in TREES
        for method in ("greedy", "coupled")
    ],
)
def test_trees_are_those_of_the_hosts_writer(case, method):
    found, llm = assert_same_drafts(TREES[case] | {"draft_sample_method": method}, SAMPLING)
    assert sum(map(len, found.values())) > 200
    assert llm.stats.num_failed_drafts == 0


@pytest.mark.parametrize("case", DYNAMIC)
def test_dynamic_trees_are_those_of_the_hosts_writer(case):
    found, llm = assert_same_drafts(DYNAMIC[case], SAMPLING)
    assert sum(map(len, found.values())) > 150
    assert len({len(nodes) for nodes in found.values()}) > 1, "requests, and the ends of texts, limit them"
    assert llm.stats.num_failed_drafts == 0


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 20), st.integers(1, 8), st.sampled_from(["self", "eagle"]))
@example(3, 4, 7, 5, "eagle")
def test_dynamic_trees_within_any_limits_are_those_of_the_hosts_writer(top_k, depth, num_tokens, limit, case):
    config = TREES[case] | {"draft_tree": {"top_k": top_k, "depth": depth}, "num_speculative_tokens": num_tokens}
    limits = {"num_speculative_tokens": limit}
    sampling = [
        SamplingParams(temperature=0, max_tokens=4 + i, ignore_eos=True, speculation=limits if i % 3 else None)
        for i in range(5)
    ]
    assert_same_drafts(config, sampling)


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 20), st.integers(1, 8), st.sampled_from(AT_ONCE))
@example(3, 4, 7, 5, AT_ONCE[0])
@example(3, 4, 20, 2, AT_ONCE[1])
def test_dynamic_trees_of_one_pass_within_any_limits_are_those_of_the_hosts_builder(
    top_k, depth, num_tokens, limit, drafter
):
    config = drafter | {"draft_tree": {"top_k": top_k, "depth": depth}, "num_speculative_tokens": num_tokens}
    assert_same_drafts(config, of_all_limits(limit))


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_trees_of_one_pass_of_any_shape_within_any_limits_are_those_of_the_hosts_builder(data):
    shape = data.draw(shapes(most_levels=4))
    tree = {"draft_tree": shape, "num_speculative_tokens": len(shape) + data.draw(st.integers(0, 3))}
    method = data.draw(st.sampled_from(["greedy", "coupled"]))
    config = data.draw(st.sampled_from(AT_ONCE)) | tree | {"draft_sample_method": method}
    assert_same_drafts(config, of_all_limits(data.draw(st.integers(1, 8))))


def of_all_limits(limit):
    """Requests whose texts end at different places, some of them with a limit of their own."""
    limits = {"num_speculative_tokens": limit}
    return [
        SamplingParams(
            temperature=i % 2, seed=i, max_tokens=4 + i, top_k=i, ignore_eos=True, speculation=limits if i % 3 else None
        )
        for i in range(5)
    ]


def test_of_equally_probable_nodes_the_earlier_ones_are_taken_as_by_the_host(monkeypatch):
    """Every token is as likely as every other."""
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda logits, dim: torch.full_like(logits, -1.0))
    assert_same_drafts(CASES["draft-model-dynamic-tree"], SAMPLING[:1])


def test_trees_of_too_many_candidates_are_the_hosts():
    config = DYNAMIC["self, one level"] | {"draft_tree": {"top_k": 32, "depth": 5}}
    assert device_trees.MOST_CANDIDATES < 32 + 4 * 32**2
    assert tiny_llm(config, device_step=True).executor.computation.chains is None


@st.composite
def shapes(draw, most_levels=12):
    """Paths of a tree of up to twelve nodes, each with its parent and its likelier siblings; no chain."""
    paths = [[0], [1]]
    for _ in range(draw(st.integers(0, 10))):
        above = draw(st.sampled_from([path for path in ([], *paths) if len(path) < most_levels]))
        paths.append([*above, sum(path[:-1] == above for path in paths)])
    return paths


@settings(max_examples=5, deadline=None)
@given(
    shapes(),
    st.sampled_from(["greedy", "coupled"]),
    st.sampled_from(["self", "eagle"]),
    st.integers(0, 3),
    st.integers(1, 8),
)
@example([[0], [0, 0], [0, 1], [0, 1, 0]], "coupled", "eagle", 2, 3)
@example([[0], [1], [2], [3], [3, 0], [3, 1], [3, 1, 0]], "greedy", "eagle", 0, 6)
def test_trees_of_any_shape_within_any_limits_are_those_of_the_hosts_writer(shape, method, case, num_more, limit):
    tree = {"draft_tree": shape, "num_speculative_tokens": len(shape) + num_more, "draft_sample_method": method}
    assert_same_drafts(TREES[case] | tree, of_all_limits(limit))


@pytest.mark.parametrize(
    "change",
    [{}, {"draft_sample_method": "coupled"}, {"draft_tree": {"top_k": 3, "depth": 4}, "num_speculative_tokens": 9}],
    ids=["greedy", "coupled", "dynamic"],
)
def test_no_tree_goes_beyond_the_longest_text_of_its_network(change):
    config = TREES["eagle, lopsided"] | {"max_model_len": 24} | change
    found, _ = assert_same_drafts(config, SAMPLING)
    lengths = {len(text) for _, text in found}
    assert max(lengths) == 23
    assert {len(nodes) for (_, text), nodes in found.items() if len(text) == 23} == {3}


def test_under_pressure_trees_are_those_of_the_hosts_writer_where_both_draft():
    """Preemption, chunks and prefix hits come at other steps, since the device plans a step ahead."""
    sampling = [SamplingParams(temperature=i % 2, seed=i, max_tokens=12, ignore_eos=True) for i in range(16)]
    config = CASES["eagle-tree"] | {"draft_sample_method": "coupled"}
    expected, _ = drafts_of(config, sampling, **TIGHT)
    found, llm = drafts_of(config, sampling, device_step=True, **TIGHT)
    assert llm.engine.parts.scheduler.num_preemptions > 0
    shared = expected.keys() & found.keys()
    assert len(shared) > 30
    for text in shared:
        size = min(len(expected[text]), len(found[text]))
        assert found[text][:size] == expected[text][:size]


def test_what_stands_of_a_tree_that_is_right_is_moved_to_its_place():
    """The draft model is the target itself: whole paths stand, which do not lie side by side."""
    config = {"method": "draft_model", "model": str(tiny_drafter(VOCAB_SIZE, 0.0)), "draft_tree": [3, 2, 1]}
    sampling = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 4
    assert_same_drafts(config, sampling)
    llm = tiny_llm(config, device_step=True, verifies_all=True)
    texts = [one.outputs[0].token_ids for one in llm.generate(PROMPTS[:4], sampling, use_tqdm=False)]
    plain = tiny_llm().generate(PROMPTS[:4], sampling, use_tqdm=False)
    assert texts == [one.outputs[0].token_ids for one in plain]
    assert llm.stats.speculation.num_accepted_tokens > 4 * 12


def test_a_network_that_fails_within_a_tree_leaves_nothing_of_it(monkeypatch, caplog):
    """The device verifies no part of a draft that the host does not know."""
    sampling = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3
    config = {"method": "draft_model", "model": str(tiny_drafter(VOCAB_SIZE, 0.0)), "draft_tree": [3, 2, 1]}
    llm = tiny_llm(config, device_step=True, verifies_all=True)
    chains = llm.executor.computation.chains
    predict, calls = chains._predict, []

    def failing(rows, states, at):
        calls.append(1)
        if len(calls) == 3 + 3:  # two levels of the second tree are there
            raise RuntimeError("not today")
        return predict(rows, states, at)

    monkeypatch.setattr(chains, "_predict", failing)
    texts = [one.outputs[0].token_ids for one in llm.generate(PROMPTS[:3], sampling, use_tqdm=False)]
    plain = tiny_llm().generate(PROMPTS[:3], sampling, use_tqdm=False)
    assert texts == [one.outputs[0].token_ids for one in plain]
    assert llm.executor.computation.chains is None
    assert caplog.text.count("drafting on the device failed") == 1
