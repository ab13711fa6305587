"""Dynamo's router hears of each block once, after the block before it, and in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forerun.deploy.dynamo.kv_events import KVEvents, block_hash, runs
from forerun.kv.block_pool import BlockPool
from forerun.kv.block_table import BlockTable
from forerun.kv.events import BlockRemoved, BlockStored

BLOCK = 4


class Router:
    """Keeps what it is told, and refuses what Dynamo's would not find a place for."""

    def __init__(self):
        self.blocks, self.calls = {}, []

    def publish_stored(self, token_ids, num_block_tokens, block_hashes, parent_hash=None, cache_salt=None):
        self.calls.append(("stored", block_hashes))
        assert num_block_tokens == [BLOCK] * len(block_hashes)
        assert len(token_ids) == BLOCK * len(block_hashes)
        assert parent_hash is None or parent_hash in self.blocks
        for number, one in enumerate(block_hashes):
            assert -(2**63) <= one < 2**63
            before = () if parent_hash is None else self.blocks[parent_hash][1]
            self.blocks[one] = cache_salt, (*before, *token_ids[number * BLOCK :][:BLOCK])
            parent_hash = one

    def publish_removed(self, block_hashes):
        self.calls.append(("removed", block_hashes))
        for one in block_hashes:
            del self.blocks[one]


def digest(number):
    return bytes([number]) * 32


def test_blocks_that_follow_each_other_are_told_at_once():
    events = [
        BlockStored(digest(1), None, (1, 2), None),
        BlockStored(digest(2), digest(1), (3, 4), None),
        BlockStored(digest(3), digest(1), (5, 6), None),  # another text, with the same beginning
        BlockRemoved(digest(2)),
        BlockRemoved(digest(3)),
        BlockStored(digest(4), None, (1, 2), "salt"),
        BlockStored(digest(5), None, (1, 2), None),
    ]
    found = [[block_hash(digest(number)) for number in numbers] for numbers in ((1, 2), (3,), (2, 3), (4,), (5,))]
    assert [run.hashes for run in runs(events)] == found
    first = next(iter(runs(events)))
    assert (first.parent, first.token_ids) == (None, [1, 2, 3, 4])


def test_events_are_collected_for_a_router_only():
    pool, router = BlockPool(6), Router()
    events = KVEvents(pool)
    events.publish()
    assert pool.events is None
    events.attach(router)
    pool.events.add(BlockStored(digest(1), None, (1, 2, 3, 4), None))
    events.publish()
    events.publish()
    assert router.calls == [("stored", [block_hash(digest(1))])]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=20), st.sampled_from([None, "a"]), st.booleans()), max_size=15
    )
)
def test_the_router_knows_what_the_pool_holds(sequences):
    pool, router = BlockPool(6), Router()
    events = KVEvents(pool)
    events.attach(router)
    held = set()
    for token_ids, salt, is_told in sequences:
        table = BlockTable(pool, block_size=BLOCK, cache_salt=salt)
        table.match(table.prefix_digests(token_ids))
        rest = token_ids[table.num_computed :]
        if table.allocate(len(rest)):
            table.commit(rest)
        table.free()
        held.update((salt, tuple(token_ids[:end])) for end in range(BLOCK, len(token_ids) + 1, BLOCK))
        if is_told:
            events.publish()
            assert len(router.blocks) == pool.num_cached
            assert set(router.blocks.values()) <= held
