"""DFlash's drafts are those of one dense pass over the text, however the engine came by its entries."""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors.torch import load_file

from forerun import SamplingParams
from forerun.errors import ConfigError, ModelError
from tests.contract.test_contract import PROMPTS, TIGHT
from tests.drafters.recording import recorded
from tests.engines import VOCAB_SIZE, engine_of, native_target, tiny_drafter, tiny_llm, tiny_target
from tests.heads_dflash import (
    BLOCK_SIZE,
    WINDOW,
    dflash_config,
    dflash_weights,
    plain_logits,
    save_dflash,
    speculators_config,
    tiny_dflash,
)
from tests.models.paged_run import PagedRun
from tests.native import needs_kernels

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=16, ignore_eos=True)
OFF = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, speculation="off")
ALIKE = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
"""A verifier that accepts drafts whatever they are: several tokens are committed in a step."""


def dflash(**settings):
    return {"method": "dflash", "model": tiny_dflash(VOCAB_SIZE), "num_speculative_tokens": 4, **settings}


@functools.cache
def features_of(text):
    """The target's features of all places, [len(text), 2 * hidden_size]."""
    target = PagedRun(tiny_target().model)
    found = target.feed(list(text), logits_rows=[0], features=frozenset({"hidden.1", "hidden.2"})).features
    return torch.cat([found["hidden.1"], found["hidden.2"]], dim=-1)


def dense_draft(text, num_tokens):
    """What the formulas draft after a text."""
    model = tiny_target().model
    block = torch.tensor([text[-1]] + [3] * num_tokens)
    with torch.inference_mode():
        logits = plain_logits(
            load_file(tiny_dflash(VOCAB_SIZE) / "model.safetensors"),
            features=features_of(tuple(text[:-1])),
            block=block,
            embed=model.embed,
            head=model.logits,
            windows=[WINDOW, None],
            causal=[True, False],
        )
    return logits[1:].argmax(-1).tolist()


def assert_dense(seen, *, at_least):
    drafted = [(text, list(draft.token_ids)) for text, draft in seen if draft]
    assert len(drafted) >= at_least
    assert [draft for _, draft in drafted] == [dense_draft(text, len(draft)) for text, draft in drafted]


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("num_tokens", [1, BLOCK_SIZE - 1])
def test_at_any_block_size_and_length_of_draft(block_size, num_tokens):
    llm = tiny_llm(dflash(num_speculative_tokens=num_tokens), block_size=block_size)
    seen = recorded(llm)
    llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False)
    assert_dense(seen, at_least=30)


def test_where_several_tokens_are_accepted_at_once():
    llm = tiny_llm(dflash(**ALIKE))
    seen = recorded(llm)
    outputs = llm.generate(PROMPTS[:8], GREEDY, use_tqdm=False)
    assert sum(output.speculation.num_accepted_tokens for output in outputs) > 40
    assert_dense(seen, at_least=40)


def test_where_prompts_share_cached_blocks_in_a_second_run_too():
    llm = tiny_llm(dflash())
    seen = recorded(llm)
    for _ in range(2):
        llm.generate(PROMPTS[:12], GREEDY, use_tqdm=False)
    assert engine_of(llm).scheduler.num_cached_tokens > 0
    assert_dense(seen, at_least=75)


def test_where_cached_blocks_come_from_a_sequence_that_was_not_drafted_for():
    llm = tiny_llm(dflash())
    seen = recorded(llm)
    llm.generate(PROMPTS[:8], OFF, use_tqdm=False)
    assert not seen
    llm.generate(PROMPTS[:8], GREEDY, use_tqdm=False)
    assert_dense(seen, at_least=50)


def test_where_sequences_are_preempted_and_prompts_chunked():
    llm = tiny_llm(dflash(**ALIKE), **TIGHT)
    seen = recorded(llm)
    llm.generate(PROMPTS[:16], GREEDY, use_tqdm=False)
    assert engine_of(llm).scheduler.num_preemptions > 0
    assert_dense(seen, at_least=75)


def test_a_long_text_is_read_in_parts(monkeypatch):
    monkeypatch.setattr("forerun.drafters.dflash.MAX_TEXT_ROWS", 7)
    llm = tiny_llm(dflash())
    seen = recorded(llm)
    llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False)
    assert_dense(seen, at_least=30)


def test_a_drawn_draft_has_its_probabilities():
    llm = tiny_llm(dflash(draft_sample_method="probabilistic"))
    drafter, seen = engine_of(llm).drafting.drafter, []
    propose = drafter.propose
    drafter.propose = lambda context: seen.append(propose(context)) or seen[-1]
    llm.generate(PROMPTS[:3], SAMPLED, use_tqdm=False)
    drafts = [draft for drafts in seen for draft in drafts if draft.token_ids]
    assert len({draft.token_ids for draft in drafts}) > 10
    for draft in drafts:
        torch.testing.assert_close(draft.probs.sum(-1), torch.ones(len(draft)))
        assert all(row[token] > 0 for row, token in zip(draft.probs, draft.token_ids, strict=True))


def test_a_reduced_vocabulary_drafts_tokens_of_the_target(tmp_path):
    drafted = torch.arange(3, VOCAB_SIZE, 7)
    rows = tiny_target().model.head_rows(drafted)
    weights = dflash_weights() | {"lm_head.weight": rows, "d2t": drafted - torch.arange(len(drafted))}
    content = speculators_config(vocab_size=VOCAB_SIZE, draft_vocab_size=len(drafted))
    folder = save_dflash(tmp_path, content, weights)
    for method, sampling in (("greedy", GREEDY), ("coupled", SAMPLED)):
        llm = tiny_llm(dflash(model=folder, draft_sample_method=method))
        seen = recorded(llm)
        llm.generate(PROMPTS[:4], sampling, use_tqdm=False)
        tokens = {token for _, draft in seen for token in draft.token_ids}
        assert len(tokens) > 3
        assert tokens <= set(drafted.tolist())


def test_an_anchor_that_drafts_fills_a_whole_block(tmp_path):
    content = speculators_config(vocab_size=VOCAB_SIZE, draft_vocab_size=VOCAB_SIZE, sample_from_anchor=True)
    folder = save_dflash(tmp_path, content, dflash_weights())
    llm = tiny_llm(dflash(model=folder, num_speculative_tokens=BLOCK_SIZE))
    seen = recorded(llm)
    llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    assert max(len(draft) for _, draft in seen) == BLOCK_SIZE


def test_beyond_its_own_maximum_it_drafts_nothing_and_the_text_goes_on():
    llm = tiny_llm(dflash(max_model_len=30))
    seen = recorded(llm)
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate([[1, 2, 3], list(range(40))], sampling, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40, 40]
    assert max(len(text) + len(draft) for text, draft in seen if draft) == 30


@needs_kernels
def test_on_the_kernels_drafts_do_not_depend_on_the_way_there():
    loose, tight = (
        tiny_llm(dflash(model="tiny-dflash", **ALIKE), target=native_target(), **settings) for settings in ({}, TIGHT)
    )
    drafts = []
    for llm in (loose, tight):
        seen = recorded(llm)
        llm.generate(PROMPTS[:24], GREEDY, use_tqdm=False)
        drafts.append({tuple(text): draft for text, draft in seen if len(draft) == 4})
    both = drafts[0].keys() & drafts[1].keys()
    assert len(both) > 75
    assert all(drafts[0][text] == drafts[1][text] for text in both)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": None}, "method 'dflash' needs 'model', got None"),
        ({"draft_sample_method": "lucky"}, "draft_sample_method: got 'lucky'; may be greedy, probabilistic, coupled"),
        ({"max_model_len": 0}, "max_model_len .of the drafter.: got 0; must be an integer of 1 or more"),
        ({"max_model_len": 10**6}, "its checkpoint allows at most 512; lower it"),
        ({"num_speculative_tokens": None}, "method 'dflash' has no default"),
        ({"num_speculative_tokens": BLOCK_SIZE}, "got 8; the checkpoint predicts 7 tokens ahead; lower it"),
        ({"num_speculative_tokens": 9, "draft_tree": [1] * 8}, "is 8 levels deep; the checkpoint predicts 7"),
        ({"draft_tree": [3, 2]}, "draft_tree: has 9 nodes, num_speculative_tokens allows 4"),
    ],
)
def test_a_wrong_setting_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        tiny_llm({key: value for key, value in dflash(**settings).items() if (key, value) != ("model", None)})


def test_a_checkpoint_of_another_kind_is_refused():
    with pytest.raises(ModelError, match="use a DFlash checkpoint"):
        tiny_llm(dflash(model=tiny_drafter(VOCAB_SIZE)))


def test_a_head_for_another_vocabulary_is_refused(tmp_path):
    folder = save_dflash(tmp_path, dflash_config(vocab_size=264), dflash_weights())
    with pytest.raises(ModelError, match="vocab_size: got 264, this target has 97"):
        tiny_llm(dflash(model=folder))
