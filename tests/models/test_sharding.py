"""How a decoder is shared out: every output belongs to one rank, and a group of heads is never cut."""

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
    num_ranks = data.draw(st.integers(1, num_kv_heads))
    shards = [Shard(whole, rank, num_ranks) for rank in range(num_ranks)]
    for name in ("kv_heads", "heads", "output_tiles", "gate_tiles", "head_tiles"):
        parts = [getattr(shard, name) for shard in shards]
        assert parts[0].start == 0
        assert all(one.stop == following.start for one, following in itertools.pairwise(parts))
        sizes_of_parts = [len(part) for part in parts]
        assert max(sizes_of_parts) - min(sizes_of_parts) <= (group if name == "heads" else 1)
        assert sizes_of_parts == sorted(sizes_of_parts, reverse=True)
    assert shards[-1].output_tiles.stop * 32 >= whole.hidden_size
    assert shards[-1].gate_tiles.stop * 16 >= whole.intermediate_size
    assert shards[-1].head_tiles.stop * 32 >= whole.vocab_size
    outputs = sorted(output for shard in shards for part in shard.qkv_outputs for output in part)
    assert outputs == list(range((whole.num_heads + 2 * num_kv_heads) * head_dim))


def test_three_heads_on_two_ranks_are_two_and_one():
    whole = replace(LLAMA, num_kv_heads=3)
    assert [list(Shard(whole, rank, 2).kv_heads) for rank in range(2)] == [[0, 1], [2]]
    assert list(Shard(whole, 1, 2).heads) == [4, 5]


def test_more_ranks_than_heads_are_refused_with_how_many_may_be():
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size: got 3; this model has 2 key-value heads.*may be 1 to 2"
    ):
        Shard(LLAMA, 0, 3)
