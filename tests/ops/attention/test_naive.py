"""The oracle against attention written out by hand."""

import math

import numpy as np
import pytest
import torch

from forerun.core.batch import ForwardBatch, LayerKVSpec, SequenceRows
from forerun.kv.cache import KVCache
from forerun.ops.attention.naive import NaiveAttention

KEYS = torch.tensor([1.0, -2.0, 0.5, 3.0])  # of tokens 0 to 3; their values are 10, 20, 30, 40
VALUES = torch.tensor([10.0, 20.0, 30.0, 40.0])


def attend(*, num_context, tree_mask=None, num_hidden=0, positions=None, query_heads=1, **options):
    """Attention of rows num_context.. of the four tokens with query 1, in blocks 2, 0 of size 2."""
    num_rows = 4 - num_context
    slots = torch.tensor([4, 5, 0, 1])
    spec = LayerKVSpec(num_kv_heads=1, key_dim=1, value_dim=1)
    cache = KVCache([spec], num_blocks=3, block_size=2, dtype=torch.float32, device=torch.device("cpu"))
    cache.layers[0].key[slots[:num_context], 0, 0] = KEYS[:num_context]
    cache.layers[0].value[slots[:num_context], 0, 0] = VALUES[:num_context]
    rows = SequenceRows(
        num_context=num_context,
        num_rows=num_rows,
        block_ids=np.array([2, 0], dtype=np.int32),
        tree_mask=tree_mask,
        num_hidden=num_hidden,
    )
    batch = ForwardBatch(
        token_ids=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.tensor(positions or list(range(num_context, 4))),
        slot_mapping=slots[num_context:],
        sequences=[rows],
        block_size=2,
        logits_rows=torch.arange(num_rows),
    )
    new = slice(num_context, 4)
    query = torch.ones(num_rows, query_heads, 1)
    run = NaiveAttention().begin(batch, cache)
    return run(0, query, KEYS[new].view(-1, 1, 1), VALUES[new].view(-1, 1, 1), scale=1.0, **options)[:, 0, 0]


def by_hand(seen, *, soft_cap=None, sink=None):
    scores = [KEYS[i].item() for i in seen]
    if soft_cap is not None:
        scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
    weights = [math.exp(score) for score in scores]
    total = sum(weights) + (0.0 if sink is None else math.exp(sink))
    return sum(weight * VALUES[i].item() for weight, i in zip(weights, seen, strict=True)) / total


def test_causal_row_sees_itself_and_all_before():
    expected = torch.tensor([by_hand([0, 1]), by_hand([0, 1, 2]), by_hand([0, 1, 2, 3])])
    torch.testing.assert_close(attend(num_context=1), expected)


def test_window_counts_the_row_itself():
    torch.testing.assert_close(attend(num_context=3, window=2), torch.tensor([by_hand([2, 3])]))


def test_no_row_sees_hidden_places():
    torch.testing.assert_close(attend(num_context=3, num_hidden=2), torch.tensor([by_hand([2, 3])]))


def test_a_wide_mask_says_which_of_the_last_places_of_the_context_are_seen():
    mask = torch.tensor([[True, False, True]])
    torch.testing.assert_close(attend(num_context=3, tree_mask=mask), torch.tensor([by_hand([0, 1, 3])]))


def test_tree_row_sees_context_and_its_ancestors_only():
    siblings = torch.eye(2, dtype=torch.bool)
    expected = torch.tensor([by_hand([0, 1, 2]), by_hand([0, 1, 3])])
    torch.testing.assert_close(attend(num_context=2, tree_mask=siblings, positions=[2, 2]), expected)


def test_window_of_tree_row_counts_depth_not_slots():
    siblings = torch.eye(2, dtype=torch.bool)
    expected = torch.tensor([by_hand([1, 2]), by_hand([1, 3])])
    torch.testing.assert_close(attend(num_context=2, tree_mask=siblings, positions=[2, 2], window=2), expected)


def test_soft_cap_bends_scores_before_the_mask():
    torch.testing.assert_close(attend(num_context=3, soft_cap=2.0), torch.tensor([by_hand(range(4), soft_cap=2.0)]))


@pytest.mark.parametrize("sink", [-1.0, 2.0])
def test_sink_takes_weight_and_gives_no_value(sink):
    result = attend(num_context=3, sinks=torch.tensor([sink]))
    torch.testing.assert_close(result, torch.tensor([by_hand(range(4), sink=sink)]))
