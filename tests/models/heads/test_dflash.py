"""DFlash's head over a paged cache computes what its formulas say over dense tensors, each flag."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.errors import ModelError
from forerun.kv.cache import KVCache
from forerun.models.base import choose_attention
from forerun.models.heads.dflash import load_dflash
from tests.engines import native_target, tiny_target
from tests.heads_dflash import (
    BLOCK_SIZE,
    MASK_TOKEN,
    TARGET_LAYERS,
    WIDTH,
    dflash_config,
    dflash_weights,
    plain_logits,
    save_dflash,
    speculators_config,
)
from tests.native import needs_kernels

VOCAB_SIZE = 97
NUM_CONTEXT = 11
PAGE = 4
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 6,
}


def features(count=NUM_CONTEXT, *, num=2):
    source = torch.Generator().manual_seed(5)
    return [2 * torch.randn(count, WIDTH, generator=source) for _ in range(num)]


def paged_logits(head, target, given, block):
    """The logits of a block after a text whose entries were written in two parts, to blocks in no order."""
    num_context, num_rows = len(given[0]), len(block)
    num_blocks = 12
    attention = choose_attention(head.kv_specs, target.kernels)
    cache = KVCache(head.kv_specs, num_blocks=num_blocks, block_size=PAGE, dtype=head.dtype, device=head.device)
    table = np.array(random.Random(0).sample(range(num_blocks), num_blocks), dtype=np.int32)
    places = torch.arange(num_context + num_rows)
    slots = torch.from_numpy(table).long()[places // PAGE] * PAGE + places % PAGE
    with torch.inference_mode():
        for part in (slice(0, 7), slice(7, num_context)):
            for kept, new in zip(cache.layers, head.context([one[part] for one in given], places[part]), strict=True):
                kept.key[slots[part]], kept.value[slots[part]] = new.key.to(head.dtype), new.value.to(head.dtype)

        def begin(mask):
            rows = SequenceRows(num_context=num_context, num_rows=num_rows, block_ids=table, tree_mask=mask)
            batch = ForwardBatch(
                token_ids=torch.tensor(block),
                positions=places[num_context:],
                slot_mapping=slots[num_context:],
                sequences=[rows],
                block_size=PAGE,
                logits_rows=torch.arange(num_rows),
            )
            return batch, attention.begin(batch, cache)

        batch, whole = begin(torch.ones(num_rows, num_rows, dtype=torch.bool))
        _, causal = begin(None)
        return head.logits(head.forward(batch.token_ids, batch.positions, whole, causal))


def assert_same(folder, content, weights, *, target=None, mask=None, embed=None, head=None, **plain):
    """Load a head and hold its logits to the formulas'."""
    target = target or tiny_target()
    loaded = load_dflash(save_dflash(folder, content, weights, mask=mask), target)
    given = [one.to(target.model.dtype) for one in features(num=len(loaded.needs))]
    block = loaded.block(9, 5)
    with torch.inference_mode():
        expected = plain_logits(
            weights,
            features=torch.cat(given, dim=-1).float(),
            block=torch.tensor(block),
            embed=embed or (lambda ids: target.model.embed(ids).float()),
            head=head or target.model.logits,
            **plain,
        )
    torch.testing.assert_close(paged_logits(loaded, target, given, block), expected, rtol=2e-4, atol=2e-4)
    return loaded


def test_the_authors_layout(tmp_path):
    head = assert_same(tmp_path, dflash_config(vocab_size=VOCAB_SIZE), dflash_weights())
    assert head.needs == ("hidden.1", "hidden.2"), "outputs of layers 0 and 1"
    assert head.block(9, 3) == [9, MASK_TOKEN, MASK_TOKEN, MASK_TOKEN]
    assert head.max_tokens == BLOCK_SIZE - 1


@needs_kernels
def test_on_the_kernels(tmp_path):
    target = native_target(torch.float32)
    content = dflash_config(vocab_size=264, **SLIDING)
    assert_same(tmp_path, content, dflash_weights(), target=target, windows=[6, None], causal=[True, False])


@needs_kernels
def test_on_the_kernels_in_bf16_nearly(tmp_path):
    target = native_target(torch.bfloat16)
    weights = {name: weight.bfloat16() for name, weight in dflash_weights().items()}
    head = load_dflash(save_dflash(tmp_path, dflash_config(vocab_size=264), weights), target)
    block = head.block(9, 5)
    expected = plain_logits(
        {name: weight.float() for name, weight in weights.items()},
        features=torch.cat(features(), dim=-1),
        block=torch.tensor(block),
        embed=target.model.embed,
        head=target.model.logits,
    )
    found = paged_logits(head, target, features(), block)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_other_numbers_of_layers_and_features(tmp_path):
    content = dflash_config(vocab_size=VOCAB_SIZE, num_layers=3)
    content["dflash_config"]["target_layer_ids"] = [0]
    assert_same(tmp_path, content, dflash_weights(num_layers=3, num_features=1))


def test_keys_of_dflash_may_stand_at_the_top(tmp_path):
    content = dflash_config(vocab_size=VOCAB_SIZE)
    assert_same(tmp_path, content | content.pop("dflash_config"), dflash_weights())


def test_biases(tmp_path):
    content = dflash_config(vocab_size=VOCAB_SIZE, attention_bias=True)
    assert_same(tmp_path, content, dflash_weights(bias=True))


def test_layers_with_a_window_are_causal(tmp_path):
    content = dflash_config(vocab_size=VOCAB_SIZE, **SLIDING)
    assert_same(tmp_path, content, dflash_weights(), windows=[6, None], causal=[True, False])


def test_is_causal_is_of_all_layers(tmp_path):
    content = dflash_config(vocab_size=VOCAB_SIZE, is_causal=True, **SLIDING)
    assert_same(tmp_path / "causal", content, dflash_weights(), windows=[6, None], causal=[True, True])
    content = dflash_config(vocab_size=VOCAB_SIZE, is_causal=False)
    assert_same(tmp_path / "not", content, dflash_weights())


def test_rotary_pairs_side_by_side(tmp_path):
    content = dflash_config(vocab_size=VOCAB_SIZE, is_neox_style=False, attention_bias=True)
    assert_same(tmp_path, content, dflash_weights(bias=True), neox=False)


@pytest.mark.parametrize("wrap", [lambda mask: mask, lambda mask: {"embedding": mask, "mask_token_id": MASK_TOKEN}])
def test_a_mask_with_an_embedding_of_its_own(tmp_path, wrap):
    mask = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(2))

    def embed(ids):
        return torch.where((ids == MASK_TOKEN)[:, None], mask, tiny_target().model.embed(ids))

    assert_same(tmp_path, dflash_config(vocab_size=VOCAB_SIZE), dflash_weights(), mask=wrap(mask), embed=embed)


def test_an_embedding_and_a_head_of_its_own(tmp_path):
    source = torch.Generator().manual_seed(3)
    table, rows = (torch.randn(VOCAB_SIZE, WIDTH, generator=source) for _ in range(2))
    weights = dflash_weights() | {"embed_tokens.weight": table, "lm_head.weight": rows}
    content = dflash_config(vocab_size=VOCAB_SIZE)
    assert_same(tmp_path, content, weights, embed=lambda ids: table[ids], head=lambda normed: normed @ rows.T)


def test_speculators_layout_with_a_part_of_the_vocabulary(tmp_path):
    source = torch.Generator().manual_seed(4)
    drafted = torch.randperm(VOCAB_SIZE, generator=source)[:40].sort().values
    rows = torch.randn(40, WIDTH, generator=source)
    marks = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    marks[drafted] = True
    own = {"lm_head.weight": rows, "d2t": drafted - torch.arange(40), "t2d": marks}
    weights = dflash_weights() | own | {"verifier_norm.weight": torch.ones(WIDTH)}
    content = speculators_config(vocab_size=VOCAB_SIZE, draft_vocab_size=40)
    head = assert_same(tmp_path, content, weights, head=lambda normed: normed @ rows.T)
    assert head.needs == ("hidden.1", "hidden.2")
    assert head.target_ids.tolist() == drafted.tolist()


def test_an_anchor_that_drafts_too(tmp_path):
    content = speculators_config(vocab_size=VOCAB_SIZE, draft_vocab_size=VOCAB_SIZE, sample_from_anchor=True)
    head = assert_same(tmp_path, content, dflash_weights())
    assert head.max_tokens == BLOCK_SIZE
    assert head.block(9, 3) == [9, MASK_TOKEN, MASK_TOKEN]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "tensor 'fc.weight' has shape .48, 96., expected .32, 96."),
        ({"vocab_size": 98}, "vocab_size: got 98, this target has 97; use a head that was trained for this target"),
        ({"num_target_layers": 9}, f"num_target_layers: got 9, this target has {TARGET_LAYERS}"),
        ({"target_hidden_size": 64}, "target_hidden_size: got 64, this target has 48"),
        ({"block_size": None}, "block_size: got None; must be an integer; use a DFlash checkpoint"),
        ({"block_size": 1}, "block_size: got 1; must be 2 or more"),
        ({"use_swa": True}, "use_swa: got True, which is not covered"),
        ({"output_multiplier": 0.5}, "output_multiplier: got 0.5, which is not covered"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type: got 'dspark'; must be 'dflash'"),
        ({"is_causal": False, **SLIDING}, "layers of sliding attention that see later rows are not covered"),
        (
            {"dflash_config": {"mask_token_id": 97, "target_layer_ids": [0, 1]}},
            "mask_token_id: got 97; must be from 0 to 96",
        ),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id: got None; must be an integer"),
        ({"dflash_config": {"mask_token_id": 3}}, "has neither target_layer_ids nor aux_hidden_state_layer_ids"),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]}},
            "reads the residual stream before layer 3; must be from 0 to 2 for this target",
        ),
        ({"draft_vocab_size": 40}, "has no d2t, but a draft vocabulary of 40 tokens for the target's 97"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path, changes, message):
    content = dflash_config(vocab_size=VOCAB_SIZE) | changes
    with pytest.raises(ModelError, match=message):
        load_dflash(save_dflash(tmp_path, content, dflash_weights()), tiny_target())


def test_a_surplus_tensor_is_refused(tmp_path):
    weights = dflash_weights() | {"markov_head.w1": torch.ones(2)}
    with pytest.raises(ModelError, match=r"got surplus tensor .markov_head"):
        load_dflash(save_dflash(tmp_path, dflash_config(vocab_size=VOCAB_SIZE), weights), tiny_target())


def test_a_missing_tensor_is_refused(tmp_path):
    weights = dflash_weights()
    del weights["hidden_norm.weight"]
    with pytest.raises(ModelError, match=r"tensor .hidden_norm.weight. is missing"):
        load_dflash(save_dflash(tmp_path, dflash_config(vocab_size=VOCAB_SIZE), weights), tiny_target())


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(WIDTH + 1), "has 49 values; must be 48, the head's hidden_size"),
        ({"embedding": torch.ones(WIDTH), "mask_token_id": 4}, "is of mask token 4, the head's is 3"),
        ({"weights": torch.ones(WIDTH)}, "got a NoneType; must be a tensor, or hold one as 'embedding'"),
        (object, "cannot be read"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(tmp_path, mask, message):
    folder = save_dflash(tmp_path, dflash_config(vocab_size=VOCAB_SIZE), dflash_weights(), mask=mask)
    with pytest.raises(ModelError, match=message):
        load_dflash(folder, tiny_target())
