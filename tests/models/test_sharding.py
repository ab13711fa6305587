"""How a decoder is shared out: every output belongs to a rank, and so does every item of attention."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.models.families import decoder_config
from forerun.models.sharding import Shard
from tests.tiny_models import tiny_config

LLAMA = decoder_config(tiny_config("LlamaForCausalLM"))


@given(
    num_kv_heads=st.integers(1, 9),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 8, 32, 80]),
    width=st.integers(1, 300),
    vocab_size=st.integers(1, 1000),
    data=st.data(),
)
def test_the_ranks_share_every_output_without_overlap(num_kv_heads, group, head_dim, width, vocab_size, data):
    sizes = {"hidden_size": 2 * width, "intermediate_size": 3 * width, "vocab_size": vocab_size, "head_dim": head_dim}
    whole = replace(LLAMA, num_heads=num_kv_heads * group, num_kv_heads=num_kv_heads, **sizes)
    num_ranks = data.draw(st.integers(1, whole.num_heads))
    shards = [Shard(whole, rank, num_ranks) for rank in range(num_ranks)]
    for name in ("output_tiles", "gate_tiles", "head_tiles"):
        parts = [getattr(shard, name) for shard in shards]
        assert parts[0].start == 0
        assert all(one.stop == following.start for one, following in itertools.pairwise(parts))
        sizes_of_parts = [len(part) for part in parts]
        assert max(sizes_of_parts) - min(sizes_of_parts) <= 1
        assert sizes_of_parts == sorted(sizes_of_parts, reverse=True)
    assert shards[-1].output_tiles.stop * 32 >= whole.hidden_size
    assert shards[-1].gate_tiles.stop * 16 >= whole.intermediate_size
    assert shards[-1].head_tiles.stop * 32 >= whole.vocab_size
    assert all(shard.heads for shard in shards)
    outputs = {output for shard in shards for part in shard.qkv_outputs for output in part}
    assert outputs == set(range((whole.num_heads + 2 * num_kv_heads) * head_dim))


@given(num_kv_heads=st.integers(1, 12), data=st.data())
def test_every_item_of_attention_is_computed_by_one_rank(num_kv_heads, data):
    whole = replace(LLAMA, num_heads=3 * num_kv_heads, num_kv_heads=num_kv_heads)
    num_ranks = data.draw(st.integers(1, whole.num_heads))
    shards = [Shard(whole, rank, num_ranks) for rank in range(num_ranks)]
    turns = [(kv_head, turn) for shard in shards for kv_head in shard.kv_heads for turn in shard.turns(kv_head)]
    assert sorted(turns) == [(kv_head, turn) for kv_head in range(num_kv_heads) for turn in range(num_ranks)]
    for shard in shards:  # as the kernels are told
        struct, heads = shard.struct(), shard.kv_heads
        for kv_head in heads:
            first = struct.first_part if kv_head == heads[0] else 0
            end = struct.end_part if kv_head == heads[-1] else num_ranks
            assert range(first, end) == shard.turns(kv_head)


@given(num_kv_heads=st.integers(1, 12), data=st.data())
def test_heads_are_shared_only_where_no_rank_computes_more_of_them_for_it(num_kv_heads, data):
    whole = replace(LLAMA, num_heads=num_kv_heads, num_kv_heads=num_kv_heads)
    num_ranks = data.draw(st.integers(1, num_kv_heads))
    shards = [Shard(whole, rank, num_ranks) for rank in range(num_ranks)]
    fewest = -(-num_kv_heads // num_ranks)
    assert max(len(shard.kv_heads) for shard in shards) == fewest
    work = [sum(len(shard.turns(kv_head)) for kv_head in shard.kv_heads) for shard in shards]
    assert set(work) == {num_kv_heads} or max(work) == fewest * num_ranks


def test_three_key_heads_on_two_ranks_are_one_and_a_half_each():
    whole = replace(LLAMA, num_heads=9, num_kv_heads=3)
    shards = [Shard(whole, rank, 2) for rank in range(2)]
    assert [list(shard.kv_heads) for shard in shards] == [[0, 1], [1, 2]]
    assert [list(shard.heads) for shard in shards] == [[0, 1, 2, 3, 4, 5], [3, 4, 5, 6, 7, 8]]
    assert [list(shard.turns(1)) for shard in shards] == [[0], [1]]


def test_eight_key_heads_on_three_ranks_are_not_shared():
    whole = replace(LLAMA, num_heads=8, num_kv_heads=8)
    assert [len(Shard(whole, rank, 3).kv_heads) for rank in range(3)] == [3, 3, 2]


def test_more_ranks_than_query_heads_are_refused_with_how_many_may_be():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: got 7; this model has 6 query heads.*may be 1 to 6"):
        Shard(LLAMA, 0, 7)
