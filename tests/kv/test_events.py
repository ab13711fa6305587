"""Whoever replays a pool's events knows at any time which prefixes it holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.kv.block_pool import BlockPool
from forerun.kv.block_table import BlockTable
from forerun.kv.events import BlockEventLog, BlockRemoved, BlockStored
from forerun.kv.prefix_cache import block_digests, root_digest

BLOCK = 4
TOKENS = list(range(100, 116))


def watched_pool(num_blocks=10, **options):
    pool = BlockPool(num_blocks, **options)
    pool.events = BlockEventLog()
    return pool


def compute(pool, token_ids, *, salt=None, chunk=None):
    """Compute a sequence, `chunk` tokens a step, and end it; False where there is no room."""
    table = BlockTable(pool, block_size=BLOCK, cache_salt=salt)
    table.match(table.prefix_digests(token_ids))
    while rest := token_ids[table.num_computed :][:chunk]:
        if not table.allocate(len(rest)):
            table.free()
            return False
        table.commit(rest)
    table.free()
    return True


def test_a_stored_block_comes_with_its_tokens_and_the_block_before_it():
    pool = watched_pool()
    compute(pool, TOKENS[:11], salt="mine")
    first, second = block_digests(root_digest("mine"), TOKENS[:8], block_size=BLOCK)
    assert pool.events.take() == [
        BlockStored(first, None, tuple(TOKENS[:4]), "mine"),
        BlockStored(second, first, tuple(TOKENS[4:8]), "mine"),
    ]
    assert pool.events.take() == []


def test_what_is_cached_already_is_not_told_again():
    pool = watched_pool()
    compute(pool, TOKENS)
    pool.events.take()
    compute(pool, TOKENS)
    twins = [BlockTable(pool, block_size=BLOCK) for _ in range(2)]
    for table in twins:  # both compute the same block, and one of the two is given back
        assert table.allocate(4)
        table.commit(TOKENS[:4])
    assert pool.events.take() == []


def test_an_evicted_block_and_a_forgotten_cache_are_told():
    pool = watched_pool(num_blocks=4)
    compute(pool, TOKENS)
    stored = [event.digest for event in pool.events.take()]
    assert pool.take(1) is not None
    assert pool.events.take() == [BlockRemoved(stored[-1])]
    pool.give_back([next(block for block in range(4) if pool.num_references(block))])
    assert pool.reset_prefix_cache()
    assert {event.digest for event in pool.events.take()} == set(stored[:-1])


@pytest.mark.parametrize("caching", [True, False])
def test_without_prefix_caching_there_are_no_events(caching):
    pool = watched_pool(enable_prefix_caching=caching)
    compute(pool, TOKENS)
    assert bool(pool.events.take()) == caching


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=24), st.sampled_from([None, "a"]), st.integers(1, 9)),
        max_size=20,
    )
)
def test_replayed_events_give_the_pools_prefixes(sequences):
    pool = watched_pool(num_blocks=7)
    known = set()
    for token_ids, salt, chunk in sequences:
        compute(pool, token_ids, salt=salt, chunk=chunk)
        for event in pool.events.take():
            if isinstance(event, BlockRemoved):
                known.remove(event.digest)
                continue
            assert event.digest not in known
            assert event.parent is None or event.parent in known
            parent = event.parent or root_digest(event.cache_salt)
            assert list(block_digests(parent, event.token_ids, block_size=BLOCK)) == [event.digest]
            known.add(event.digest)
        assert len(known) == pool.num_cached
        assert all(pool.find(digest) is not None for digest in known)
