"""What the device drafts is what the host would draft after the same texts, token for token: chains, and trees of one pass.

`test_device_trees.py` has trees of a pass for each level, and limits of all kinds.
"""

from __future__ import annotations

import functools

import pytest
import torch

from forerun import SamplingParams
from tests import heads_eagle, heads_medusa
from tests.contract.test_contract import PROMPTS, TIGHT
from tests.drafters.recording import recorded, recorded_on_device
from tests.engines import VOCAB_SIZE, engine_of, pard_drafter, tiny_llm, tiny_target
from tests.heads_dflash import WINDOW, dflash_config, dflash_weights, speculators_config
from tests.step_recorder import ClosureRecorder

ALLOWED = [3, 4, 5]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
FEW = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True, allowed_token_ids=ALLOWED)
MIXED = [SamplingParams(temperature=i % 2, top_p=0.9, seed=i, max_tokens=14, ignore_eos=True) for i in range(6)]


def medusa_of_few_tokens(target):
    """Heads that draft the tokens of `FEW` alone, so that several are often accepted."""
    config, tensors = heads_medusa.medusa(target, num_draft=len(ALLOWED))
    tensors["token_map"] = torch.tensor(ALLOWED[::-1])
    return config, tensors


def peagle_of_few_tokens(target):
    """A head that does."""
    config, tensors = heads_eagle.peagle(target, num_draft=len(ALLOWED))
    tensors["d2t"] = torch.tensor(ALLOWED) - torch.arange(len(ALLOWED))
    tensors["t2d"] = torch.isin(torch.arange(VOCAB_SIZE), torch.tensor(ALLOWED))
    return config, tensors


def dflash(**changes):
    """A DFlash head whose first layer has a window and is causal."""
    windows = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}
    return dflash_config(vocab_size=VOCAB_SIZE, sliding_window=WINDOW, **windows, **changes), dflash_weights()


def dflash_of_few_tokens(target):
    """One that drafts the tokens of `FEW` alone, by its anchor too, and has no causal layer."""
    ids = torch.tensor(ALLOWED)
    vocabulary = {"lm_head.weight": target.model.head_rows(ids), "d2t": ids - torch.arange(len(ids))}
    content = speculators_config(vocab_size=VOCAB_SIZE, draft_vocab_size=len(ids), sample_from_anchor=True)
    return content, dflash_weights() | vocabulary


HEADS = {
    "dflash": lambda target: dflash(),
    "dflash from its anchor": lambda target: dflash(sample_from_anchor=True),
    "dflash of few tokens": dflash_of_few_tokens,
    "peagle": heads_eagle.peagle,
    "peagle of few tokens": peagle_of_few_tokens,
    "medusa": heads_medusa.medusa,
    "medusa of few tokens": medusa_of_few_tokens,
    "mlp_speculator": heads_medusa.mlp_speculator,
}

COUPLED = {"draft_sample_method": "coupled"}
TREE = {"draft_tree": [3, 2, 1], "num_speculative_tokens": 15}
LOPSIDED = {"draft_tree": [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0], [0, 1, 0, 0]], "num_speculative_tokens": 9}
RUNNERS_UP = {"draft_tree": [[0], [1], [2], [0, 0], [0, 1], [0, 2]], "num_speculative_tokens": 6}
DYNAMIC = {"draft_tree": {"top_k": 4, "depth": 4}, "num_speculative_tokens": 12}
SMALL = {"draft_tree": [[0], [1], [0, 0], [0, 0, 0]]}
NARROW = {"draft_tree": {"top_k": 2, "depth": 4}, "num_speculative_tokens": 4}
CASES = {
    "medusa": ("medusa", {}, GREEDY),
    "medusa, some accepted": ("medusa of few tokens", {}, FEW),
    "medusa, coupled": ("medusa", COUPLED, MIXED),
    "medusa, coupled, of few tokens": ("medusa of few tokens", COUPLED, MIXED),
    "medusa, a chain of two": ("medusa", {"draft_tree": [1, 1]}, GREEDY),
    "mlp_speculator": ("mlp_speculator", {}, GREEDY),
    "mlp_speculator, coupled": ("mlp_speculator", COUPLED, MIXED),
    "mlp_speculator, a chain of two": ("mlp_speculator", {"draft_tree": [1, 1]}, GREEDY),
    "pard": ("pard", {}, GREEDY),
    "pard, coupled": ("pard", COUPLED, MIXED),
    "pard, of one token": ("pard", {"num_speculative_tokens": 1}, GREEDY),
    "peagle": ("peagle", {}, GREEDY),
    "peagle, some accepted": ("peagle of few tokens", {}, FEW),
    "peagle, coupled": ("peagle", COUPLED, MIXED),
    "peagle, a chain of two": ("peagle", {"draft_tree": [1, 1]}, GREEDY),
    "dflash": ("dflash", {}, GREEDY),
    "dflash, some accepted": ("dflash of few tokens", {}, FEW),
    "dflash, coupled": ("dflash", COUPLED, MIXED),
    "dflash, of one token": ("dflash", {"num_speculative_tokens": 1}, GREEDY),
    "dflash, a chain of two": ("dflash", {"draft_tree": [1, 1]}, GREEDY),
    "dflash from its anchor": ("dflash from its anchor", {}, GREEDY),
    "dflash from its anchor, of one token": ("dflash from its anchor", {"num_speculative_tokens": 1}, GREEDY),
    "medusa, a tree": ("medusa", TREE, GREEDY),
    "medusa, a lopsided tree": ("medusa", LOPSIDED, GREEDY),
    "medusa, a small tree, some accepted": ("medusa of few tokens", SMALL, FEW),
    "medusa, a coupled tree": ("medusa", COUPLED | LOPSIDED, MIXED),
    "medusa, a coupled tree of few tokens": ("medusa of few tokens", COUPLED | TREE, MIXED),
    "medusa, a chain with runners-up": ("medusa", RUNNERS_UP, GREEDY),
    "medusa, a dynamic tree": ("medusa", DYNAMIC, GREEDY),
    "medusa, a dynamic tree, some accepted": ("medusa of few tokens", NARROW, FEW),
    "mlp_speculator, a tree": ("mlp_speculator", TREE, GREEDY),
    "mlp_speculator, a coupled tree": ("mlp_speculator", COUPLED | LOPSIDED, MIXED),
    "mlp_speculator, a chain with runners-up": ("mlp_speculator", COUPLED | RUNNERS_UP, MIXED),
    "mlp_speculator, a dynamic tree": ("mlp_speculator", DYNAMIC, GREEDY),
    "mlp_speculator, a small tree": ("mlp_speculator", COUPLED | SMALL, MIXED),
    "pard, a tree": ("pard", TREE, GREEDY),
    "pard, a coupled tree": ("pard", COUPLED | LOPSIDED, MIXED),
    "pard, a dynamic tree": ("pard", DYNAMIC, GREEDY),
    "pard, a small dynamic tree": ("pard", NARROW, GREEDY),
    "peagle, a lopsided tree": ("peagle", LOPSIDED, GREEDY),
    "peagle, a small tree": ("peagle", SMALL, GREEDY),
    "peagle, a small tree, some accepted": ("peagle of few tokens", SMALL, FEW),
    "peagle, a coupled tree": ("peagle", COUPLED | TREE, MIXED),
    "peagle, a dynamic tree, some accepted": ("peagle of few tokens", NARROW, FEW),
    "dflash, a tree": ("dflash", TREE, GREEDY),
    "dflash, a lopsided tree": ("dflash", LOPSIDED, GREEDY),
    "dflash, a small tree": ("dflash", SMALL, GREEDY),
    "dflash, a small tree, some accepted": ("dflash of few tokens", SMALL, FEW),
    "dflash, a coupled tree": ("dflash", COUPLED | LOPSIDED, MIXED),
    "dflash, a dynamic tree": ("dflash", DYNAMIC, GREEDY),
    "dflash, a dynamic tree, some accepted": ("dflash of few tokens", NARROW, FEW),
}
"""Which head, what else its config says, and the requests."""

HARD = [
    "medusa, some accepted",
    "mlp_speculator, coupled",
    "pard",
    "peagle, some accepted",
    "dflash, some accepted",
    "dflash",
    "medusa, a dynamic tree, some accepted",
    "mlp_speculator, a small tree",
    "pard, a small dynamic tree",
    "peagle, a small tree",
    "dflash, a small tree",
]
RECORDED = [*HARD, *(f"{head}, a small tree, some accepted" for head in ("peagle", "dflash"))]
FORMS = [
    *("medusa, coupled, of few tokens", "mlp_speculator", "pard, coupled", "peagle, coupled", "dflash, coupled"),
    *(
        "dflash, of one token",
        "dflash from its anchor",
        "medusa, a lopsided tree",
        "medusa, a coupled tree of few tokens",
    ),
    *("mlp_speculator, a chain with runners-up", "mlp_speculator, a dynamic tree", "pard, a coupled tree"),
    *("pard, a dynamic tree", "peagle, a lopsided tree", "peagle, a dynamic tree, some accepted"),
    *("dflash, a coupled tree", "dflash, a dynamic tree, some accepted"),
]
"""Each form of draft with one head or another; the rest of the cases run with the slow ones."""

RUNS = [
    pytest.param(
        case,
        "recorded" if case in RECORDED else "eagerly",
        marks=() if case in (*RECORDED, *FORMS) else pytest.mark.slow,
    )
    for case in CASES
]
RUNS += [(case, "under pressure") for case in HARD]


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """A folder for heads, each of which is written once."""
    return tmp_path_factory.mktemp("heads")


def config_of(case, heads):
    head, settings, _ = CASES[case]
    if head == "pard":
        return {"method": "pard", "model": str(pard_drafter(VOCAB_SIZE)), "num_speculative_tokens": 4, **settings}
    folder = heads / head
    if not folder.exists():
        heads_eagle.save(folder, *HEADS[head](tiny_target()))
    return {"method": head.split()[0], "model": str(folder), "num_speculative_tokens": 4, **settings}


def drafts_of(llm, prompts, sampling, record):
    """text -> the nodes drafted after it, as (token, parent)"""
    seen = record(llm)
    llm.generate(prompts, sampling, use_tqdm=False)
    return {
        text: [(token_id, draft.parent(node)) for node, token_id in enumerate(draft.token_ids)]
        for text, draft in seen
        if draft.token_ids
    }


def requests_of(case, is_pressed):
    """The prompts and how they are sampled."""
    prompts, sampling = PROMPTS[: 12 if is_pressed else 6], CASES[case][2]
    return prompts, [sampling[i % 6] for i in range(len(prompts))] if isinstance(sampling, list) else sampling


@functools.cache
def drafts_of_the_host(case, is_pressed, heads):
    llm = tiny_llm(config_of(case, heads), verifies_all=True, **TIGHT if is_pressed else {})
    drafts = drafts_of(llm, *requests_of(case, is_pressed), recorded)
    assert llm.stats.num_failed_drafts == 0
    return drafts


@pytest.mark.parametrize(("case", "how"), RUNS)
def test_the_device_drafts_what_the_host_would(case, how, heads):
    is_pressed = how == "under pressure"
    expected = drafts_of_the_host(case, is_pressed, heads)
    llm = tiny_llm(config_of(case, heads), verifies_all=True, device_step=True, **TIGHT if is_pressed else {})
    if how == "recorded":
        llm.executor.use_graphs([8, 24, 64], ClosureRecorder())
    found = drafts_of(llm, *requests_of(case, is_pressed), recorded_on_device)
    both = found.keys() & expected.keys()  # where tokens are accepted, not all steps end at the same places
    assert len(both) > 0.75 * len(expected) > 30
    assert {text: found[text] for text in both} == {text: expected[text] for text in both}
    assert llm.stats.num_failed_drafts == 0
    assert (engine_of(llm).scheduler.num_preemptions > 0) == (how == "under pressure")
    assert (llm.stats.times.num_replayed_steps > 7) == (how == "recorded")
    assert llm.executor.computation.drafts_trees == any(word in case for word in ("tree", "runners-up"))
    if "some accepted" in case:
        assert llm.stats.speculation.accepted_per_position[2] > 0


@pytest.mark.parametrize(("case", "drafts_greedily"), [("medusa", True), ("medusa, coupled", False)])
def test_where_rules_change_logits_coupled_chains_are_the_hosts(case, drafts_greedily, heads):
    llm = tiny_llm(config_of(case, heads), verifies_all=True, device_step=True)
    by_host, on_device = recorded(llm), recorded_on_device(llm)
    penalised = SamplingParams(temperature=0.9, presence_penalty=0.5, seed=1, max_tokens=12, ignore_eos=True)
    llm.generate(PROMPTS[:2], penalised, use_tqdm=False)
    drafts = on_device if drafts_greedily else by_host
    assert len(drafts) > 10
    assert len(by_host) + len(on_device) == len(drafts)


@pytest.mark.parametrize("case", ["pard", "peagle", "dflash"])
def test_beyond_the_longest_text_of_a_network_nothing_is_drafted(case, heads):
    llm = tiny_llm(config_of(case, heads) | {"max_model_len": 30}, device_step=True)
    seen = recorded_on_device(llm)
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), use_tqdm=False)
    assert max(len(text) + len(draft) for text, draft in seen) == 30
