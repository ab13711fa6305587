"""Chains that the kernels draft in one call: the tokens are those of passes one by one, whatever shares the call."""

from __future__ import annotations

import math
from array import array
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from forerun import SamplingParams
from forerun.drafters.margins import PRIOR_CHANCES, UNKNOWN, EarlyStop, margin_class
from forerun.drafters.neural import forward
from forerun.errors import ConfigError
from forerun.ops.native.chains import ChainText
from forerun.ops.sampling import SamplingRules
from tests import heads_eagle, heads_medusa
from tests.contract.test_contract import PROMPTS, TIGHT
from tests.drafters.recording import recorded, recorded_under_pressure
from tests.drafters.test_eagle import KINDS
from tests.engines import engine_of, native_target, tiny_head, tiny_llm, tiny_target
from tests.native import needs_kernels, threads

pytestmark = needs_kernels

K = 4
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
EAGLE3 = {name: options for name, (method, options) in KINDS.items() if method == "eagle3"}
WHOLE = {"eagle3 with the whole vocabulary": {"num_draft": 264}, "eagle3, scaled logits": {"logit_scale": 0.25}}
FORMATS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "int8": (torch.bfloat16, "int8"),
}
every_format = pytest.mark.parametrize(("dtype", "quantization"), FORMATS.values(), ids=FORMATS)


def chains_llm(folder, dtype, quantization=None, *, options=None, settings=None, **changes):
    """An engine on the kernels with an EAGLE-3 head."""
    target = native_target(dtype)
    heads_eagle.save(folder, *heads_eagle.eagle3(target, **(options or {})))
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": K, "quantization": quantization}
    return tiny_llm(config | changes, target=target, **(settings or {}))


def passes_of(llm):
    return engine_of(llm).drafting.drafter._passes


def one_by_one(llm):
    """The same engine, whose drafter computes pass by pass."""
    passes_of(llm)._chains = None
    return llm


def drafts(llm, prompts, sampling=GREEDY):
    """What is drafted for each text that prompts and answers come to."""
    return {text: draft.token_ids for text, draft in drafted_trees(llm, prompts, sampling).items()}


def drafted_trees(llm, prompts, sampling=GREEDY):
    seen = recorded(llm)
    llm.generate(prompts, sampling, use_tqdm=False)
    return dict(seen)


@every_format
@pytest.mark.parametrize("kind", [*EAGLE3, *WHOLE])
def test_chains_are_those_of_passes_one_by_one(kind, dtype, quantization, tmp_path):
    options = (EAGLE3 | WHOLE)[kind]
    found, expected = (
        drafts(way(chains_llm(tmp_path, dtype, quantization, options=options)), PROMPTS[:6])
        for way in (lambda llm: llm, one_by_one)
    )
    assert found == expected
    assert sum(map(len, found.values())) > 200


@pytest.mark.parametrize("kind", [*EAGLE3, *WHOLE])
def test_every_head_is_drafted_with_in_one_call(kind, tmp_path):
    assert passes_of(chains_llm(tmp_path, torch.bfloat16, options=(EAGLE3 | WHOLE)[kind]))._chains is not None


@every_format
def test_a_texts_draft_depends_on_nothing_but_the_text(dtype, quantization, tmp_path):
    """Under preemption, prefix hits and chunked prompts, in batches and alone, with one thread and with three."""
    llm = chains_llm(tmp_path, dtype, quantization, settings=TIGHT)
    together = dict(recorded_under_pressure(llm, PROMPTS[:24], GREEDY))
    for num_threads in (1, 3):
        with threads(native_target(dtype).kernels, num_threads):
            llm = chains_llm(tmp_path, dtype, quantization)
            alone = {text: ids for prompt in PROMPTS[:8] for text, ids in drafts(llm, [prompt]).items()}
        shared = alone.keys() & together.keys()
        assert len(shared) > 20
        for text in shared:
            drafted = together[text].token_ids
            assert alone[text][: len(drafted)] == drafted[: len(alone[text])]


def test_long_texts_are_read_part_by_part(tmp_path, monkeypatch):
    long = [[(7 * i) % 250 for i in range(100)], [3, 1, 4]]
    expected = drafts(chains_llm(tmp_path, torch.bfloat16), long)
    monkeypatch.setattr(forward, "MAX_TEXT_ROWS", 7)
    assert drafts(chains_llm(tmp_path, torch.bfloat16), long) == expected


def test_a_head_whose_state_is_the_last_hidden_state_needs_no_fusion(tmp_path):
    change = {"config": {"use_aux_hidden_state": False}, "drop": ["fc.weight"]}
    heads_eagle.save_damaged(tmp_path, heads_eagle.eagle3, native_target(), **change)
    config = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": K}
    found, expected = (
        drafts(way(tiny_llm(config, target=native_target())), PROMPTS[:4]) for way in (lambda llm: llm, one_by_one)
    )
    assert found == expected
    assert sum(map(len, found.values())) > 100


RULES = {
    "plain": {},
    "nucleus": {"top_p": 0.7, "temperature": 1.3},
    "few": {"top_k": 5, "min_p": 0.05},
    "more than a head drafts": {"top_k": 100},
    "ends not yet": {"min_tokens": 4},
    "penalised": {"repetition_penalty": 1.3},
}


@every_format
@pytest.mark.parametrize("kind", ["eagle3", *WHOLE])
@pytest.mark.parametrize("rules", RULES)
def test_tokens_that_are_drawn_are_those_of_passes_one_by_one(rules, kind, dtype, quantization, tmp_path):
    """Beside requests without rules of their own, and greedy ones."""
    of_each = [
        SamplingParams(**({"temperature": 1.0, "seed": seed, "max_tokens": 12, "ignore_eos": True} | changes))
        for seed, changes in enumerate([RULES[rules], {}, {"temperature": 0}, RULES[rules]])
    ]
    options = {"options": (EAGLE3 | WHOLE)[kind], "draft_sample_method": "coupled"}
    found, expected = (
        drafts(way(chains_llm(tmp_path, dtype, quantization, **options)), PROMPTS[:4], of_each)
        for way in (lambda llm: llm, one_by_one)
    )
    assert found == expected
    assert sum(map(len, found.values())) > 60


@every_format
def test_a_vocabulary_in_any_order_is_drafted_with_pass_by_pass(dtype, quantization, tmp_path):
    target = native_target(dtype)
    content, tensors = heads_eagle.eagle3(target)
    in_order = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    shuffled = torch.randperm(len(in_order), generator=torch.Generator().manual_seed(1))
    tensors["d2t"] = in_order[shuffled] - torch.arange(len(in_order))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][shuffled].contiguous()
    heads_eagle.save(tmp_path, content, tensors)
    config = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": K, "quantization": quantization}
    config["draft_sample_method"] = "coupled"
    of_each = [
        SamplingParams(**({"seed": seed, "max_tokens": 12, "ignore_eos": True} | changes))
        for seed, changes in enumerate([{"temperature": 0}, *RULES.values()])
    ]
    shuffled_llm = tiny_llm(config, target=target)
    assert passes_of(shuffled_llm)._chains is None
    found = drafts(shuffled_llm, PROMPTS[: len(of_each)], of_each)
    in_order_llm = chains_llm(tmp_path / "in order", dtype, quantization, draft_sample_method="coupled")
    assert found == drafts(in_order_llm, PROMPTS[: len(of_each)], of_each)
    assert sum(map(len, found.values())) > 60


BESIDE = [[0], [1], [2], [0, 0], [0, 1], [0, 2], [0, 0, 0], [0, 0, 1], [0, 0, 2]]  # two runners-up beside each token


@every_format
@pytest.mark.parametrize("kind", ["eagle3", *WHOLE])
def test_runners_up_are_those_of_passes_one_by_one(kind, dtype, quantization, tmp_path):
    """Of the likeliest tokens where a request is greedy, of the target's races where it draws."""
    of_each = [
        SamplingParams(**({"temperature": 1.0, "seed": seed, "max_tokens": 12, "ignore_eos": True} | changes))
        for seed, changes in enumerate([{}, {"temperature": 0}, RULES["few"], RULES["nucleus"]])
    ]
    options = {"options": (EAGLE3 | WHOLE)[kind], "draft_sample_method": "coupled"}
    options |= {"draft_tree": BESIDE, "num_speculative_tokens": len(BESIDE)}
    found, expected = (
        drafted_trees(way(chains_llm(tmp_path, dtype, quantization, **options)), PROMPTS[:4], of_each)
        for way in (lambda llm: llm, one_by_one)
    )
    assert found == expected
    assert sum(draft.parents is not None and len(draft) == len(BESIDE) for draft in found.values()) > 10


CHANCES = array("d", PRIOR_CHANCES[:UNKNOWN])


def stopping(llm, least):
    """The same engine, whose requests have such an early stop (of several sequences each another one); what was drafted, and how deep it might have been."""
    drafter = engine_of(llm).drafting.drafter
    propose, seen = drafter.propose, {}

    def propose_likely(context):
        requests = [
            replace(request, early_stop=EarlyStop(least[request.sequence.seq_id % len(least)], CHANCES))
            for request in context.requests
        ]
        found = propose(replace(context, requests=requests))
        for request, draft in zip(requests, found, strict=True):
            if draft.token_ids:
                deepest = min(3, request.max_depth, -(-request.max_tokens // 3))
                seen[tuple(request.sequence.tokens_from(0))] = draft, request.early_stop.least_chance, deepest
        return found

    drafter.propose = propose_likely
    return seen


BOTH = [GREEDY, SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)]


@pytest.mark.parametrize("least", [0.0, 0.1, 0.3, 1.0])
def test_a_chain_ends_just_where_its_margins_say_that_it_hardly_stands(least, tmp_path):
    changes = {"draft_tree": BESIDE, "num_speculative_tokens": len(BESIDE)}
    llm = chains_llm(tmp_path, torch.bfloat16, draft_sample_method="coupled", **changes)
    seen = stopping(llm, [least])
    llm.generate(PROMPTS[:2], BOTH, use_tqdm=False)
    num_ended = 0
    for draft, _, deepest in seen.values():
        chances = [CHANCES[margin_class(margin)] for margin in draft.margins]
        goes_on = [math.prod(chances[: depth + 1]) >= least for depth in range(len(chances))]
        assert all(goes_on[:-1])
        assert goes_on[-1] == (len(chances) == deepest) or len(chances) == deepest
        num_ended += len(chances) < deepest
    assert (num_ended > 5) == (least > 0)


def test_chains_of_one_call_end_each_where_they_do_one_by_one(tmp_path):
    changes = {"draft_tree": BESIDE, "num_speculative_tokens": len(BESIDE), "draft_sample_method": "coupled"}
    llms = [way(chains_llm(tmp_path, torch.bfloat16, **changes)) for way in (lambda llm: llm, one_by_one)]
    at_once, one_after_the_other = (stopping(llm, [0.0, 0.1, 0.3, 1.0]) for llm in llms)
    for llm in llms:
        llm.generate(PROMPTS[:8], BOTH * 4, use_tqdm=False)
    assert at_once == one_after_the_other
    assert len({len(draft) for draft, _, _ in at_once.values()}) > 2


@pytest.mark.parametrize("way", [lambda llm: llm, one_by_one], ids=["one call", "one by one"])
def test_no_chain_ends_early_whose_margins_are_not_known(way, tmp_path):
    llm = way(chains_llm(tmp_path, torch.bfloat16))
    seen = stopping(llm, [1.0])
    llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    assert max(len(draft) for draft, _, _ in seen.values()) == K


def test_runners_up_leave_the_chain_as_it_is(tmp_path):
    changes = {"draft_tree": BESIDE, "num_speculative_tokens": len(BESIDE)}
    with_them = drafted_trees(chains_llm(tmp_path, torch.bfloat16, **changes), PROMPTS[:6])
    alone = drafts(chains_llm(tmp_path, torch.bfloat16, num_speculative_tokens=3), PROMPTS[:6])
    shared = [text for text in with_them.keys() & alone.keys() if alone[text]]
    assert len(shared) > 20
    for text in shared:
        chain = [level[0] for level in with_them[text].first_path()]
        assert chain == list(alone[text][: len(chain)])


def test_a_draft_that_may_have_fewer_nodes_than_the_tree_has_its_first_ones(tmp_path):
    llm = chains_llm(tmp_path, torch.bfloat16, draft_tree=BESIDE, num_speculative_tokens=len(BESIDE))
    few = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, speculation={"num_speculative_tokens": 4})
    cut = drafted_trees(llm, PROMPTS[:2], few)
    assert max(map(len, cut.values())) <= 4


def test_drawn_tokens_are_drafted_in_one_call_unless_a_rule_changes_logits(tmp_path):
    llm = chains_llm(tmp_path, torch.bfloat16, draft_sample_method="coupled")
    calls = []
    chains = passes_of(llm)._chains
    draft = chains.draft
    chains.draft = lambda texts, *given, **more: calls.append(texts) or draft(texts, *given, **more)
    llm.generate(PROMPTS[:1], SamplingParams(seed=1, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert calls
    assert all(text.rules is not None for texts in calls for text in texts)
    calls.clear()
    llm.generate(PROMPTS[:1], SamplingParams(seed=1, max_tokens=8, presence_penalty=1.0), use_tqdm=False)
    assert not calls


# --- int8 heads -----------------------------------------------------------------------------------

HEADS = {
    "eagle": heads_eagle.eagle,
    "eagle3": heads_eagle.eagle3,
    "peagle": heads_eagle.peagle,
    "medusa": heads_medusa.medusa,
    "mlp_speculator": heads_medusa.mlp_speculator,
}


def head_config(method, target, **changes):
    model = {} if method == "mtp" else {"model": "tiny-dflash"}
    if method in HEADS:
        model = {"model": str(tiny_head(HEADS[method], target))}
    return {"method": method, "num_speculative_tokens": 3, **model, **changes}


@pytest.mark.parametrize("method", [*HEADS, "dflash", "mtp"])
def test_the_text_is_the_same_with_a_head_in_int8(method):
    target = native_target()
    plain = tiny_llm(target=target).generate(PROMPTS[:6], GREEDY, use_tqdm=False)
    llm = tiny_llm(head_config(method, target, quantization="int8"), target=target)
    outputs = llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert sum(output.speculation.num_draft_tokens for output in outputs) > 50


def test_a_head_in_int8_drafts_nearly_what_it_drafts_unrounded_and_reads_fewer_bytes(tmp_path):
    rounded, whole = (chains_llm(tmp_path, torch.bfloat16, quantization) for quantization in ("int8", None))
    assert weight_bytes(rounded) < 0.8 * weight_bytes(whole)
    found, exact = (drafts(llm, PROMPTS[:8]) for llm in (rounded, whole))
    firsts = [found[text][:1] == exact[text][:1] for text in found.keys() & exact.keys()]
    assert sum(firsts) > 0.8 * len(firsts) > 80


def weight_bytes(llm):
    """What a pass of the head reads."""
    parts = passes_of(llm)._chains._parts
    layers = sum(layer.num_bytes for layer in parts.layers.layers)
    return layers + parts.fusion.num_bytes + parts.vocabulary.num_bytes


@pytest.mark.parametrize("method", [*HEADS, "dflash", "mtp"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (tiny_target, "got 'int8', which the native CPU kernels compute in bfloat16; the target computes in float32"),
        (lambda: native_target(torch.float32), "the target computes in float32; leave it out"),
    ],
    ids=["torch", "fp32"],
)
def test_int8_is_refused_where_the_target_is_not_in_bf16_on_the_kernels(method, make, message):
    target = make()
    with pytest.raises(ConfigError, match=message):
        tiny_llm(head_config(method, target, quantization="int8"), target=target)


@pytest.mark.parametrize("method", [*HEADS, "dflash", "mtp"])
def test_an_unknown_quantization_is_refused(method):
    with pytest.raises(
        ConfigError, match=r"quantization .of the drafter.: got 'int3'; may be int8, int4, int4-symmetric, or None"
    ):
        tiny_llm(head_config(method, native_target(), quantization="int3"), target=native_target())


# --- calls that cannot be computed ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"num_drafted": 30}, "a text's blocks do not hold its draft"),
        ({"num_read": 0}, "a text's first unread place is out of range"),
        ({"token_ids": []}, "a text has no unread token"),
        ({"token_ids": [3, 264]}, "a token has no embedding"),
        ({"token_ids": [-1]}, "a token has no embedding"),
        ({"rules": SamplingRules(SamplingParams(top_p=0.5), prompt_ids=[], vocab_size=264), "seed": -1}, None),
    ],
)
def test_texts_that_do_not_fit_are_refused(change, message, tmp_path):
    llm = chains_llm(tmp_path, torch.bfloat16)
    passes, features = passes_of(llm), llm.executor.cache.features
    blocks = array("i", range(4))
    text = {"block_ids": blocks, "num_read": 1, "token_ids": [3, 1], "num_drafted": 4} | change
    with nullcontext() if message is None else pytest.raises(ValueError, match=f"draft_chains: {message}"):
        (drafted,) = passes._chains.draft([ChainText(**text)], features, passes._addresses, block_size=4)
        assert [len(level) for level in drafted.levels] == [1, 1, 1, 1]
        assert all(math.isnan(margin) for margin in drafted.margins)
