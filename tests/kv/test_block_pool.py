"""Blocks are handed out, shared, found again and evicted without one being lost or written while shared."""

import time

import pytest

from forerun.kv.block_pool import AccountingError, BlockPool


def cached(pool, *digests):
    """Take one block per digest, register it, and return the blocks, still referenced."""
    blocks = pool.take(len(digests))
    for block, digest in zip(blocks, digests, strict=True):
        assert pool.register(block, digest) == block
    return blocks


def test_all_blocks_of_a_new_pool_are_free():
    assert BlockPool(5).num_free == 5


def test_taken_blocks_are_distinct_and_have_one_holder():
    pool = BlockPool(5)
    blocks = pool.take(5)
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert [pool.num_references(block) for block in blocks] == [1] * 5


def test_take_is_all_or_nothing():
    pool = BlockPool(3)
    pool.take(1)
    assert pool.take(3) is None
    assert pool.num_free == 2


def test_taking_nothing_works_on_an_exhausted_pool():
    pool = BlockPool(1)
    pool.take(1)
    assert pool.take(0) == []


def test_block_given_back_can_be_taken_again():
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.give_back([block])
    assert pool.take(1) == [block]


def test_freed_cached_block_stays_findable():
    pool = BlockPool(2)
    blocks = cached(pool, b"a")
    pool.give_back(blocks)
    assert pool.find(b"a") == blocks[0]
    assert pool.num_free == 2


def test_sharing_a_free_cached_block_takes_it_off_the_free_list():
    pool = BlockPool(2)
    (block,) = cached(pool, b"a")
    pool.give_back([block])
    pool.share(block)
    assert pool.num_free == 1
    assert block not in pool.take(1)


def test_shared_block_is_free_only_after_its_last_holder_left():
    pool = BlockPool(1)
    (block,) = cached(pool, b"a")
    pool.share(block)
    pool.give_back([block])
    assert pool.num_free == 0
    pool.give_back([block])
    assert pool.num_free == 1


def test_uncached_free_blocks_are_used_before_cached_ones():
    pool = BlockPool(3)
    keep, lose = cached(pool, b"a", b"b")
    pool.give_back([keep, lose])
    pool.take(1)
    assert pool.find(b"a") == keep
    assert pool.find(b"b") == lose


def test_least_recently_freed_block_is_evicted_first():
    pool = BlockPool(3)
    a, b, c = cached(pool, b"a", b"b", b"c")
    pool.give_back([b])
    pool.give_back([c, a])
    assert [pool.take(1) for _ in range(3)] == [[b], [c], [a]]
    assert pool.num_cached == 0


def test_sharing_renews_a_blocks_place_in_the_eviction_order():
    pool = BlockPool(2)
    a, b = cached(pool, b"a", b"b")
    pool.give_back([a, b])
    pool.share(a)
    pool.give_back([a])
    assert pool.take(1) == [b]


def test_evicted_block_is_no_longer_found():
    pool = BlockPool(1)
    pool.give_back(cached(pool, b"a"))
    pool.take(1)
    assert pool.find(b"a") is None
    assert pool.num_cached == 0


def test_referenced_cached_block_is_never_evicted():
    pool = BlockPool(2)
    cached(pool, b"a")
    assert pool.take(2) is None
    pool.take(1)
    assert pool.find(b"a") is not None


def test_registering_known_content_swaps_the_duplicate_for_the_canonical_block():
    pool = BlockPool(2)
    (canonical,) = cached(pool, b"a")
    (duplicate,) = pool.take(1)
    assert pool.register(duplicate, b"a") == canonical
    assert pool.num_references(canonical) == 2
    assert pool.take(1) == [duplicate]


def test_registering_content_of_a_free_cached_block_revives_it():
    pool = BlockPool(2)
    (canonical,) = cached(pool, b"a")
    (duplicate,) = pool.take(1)
    pool.give_back([canonical])
    assert pool.register(duplicate, b"a") == canonical
    assert pool.num_references(canonical) == 1
    pool.check_integrity([[canonical]])


def test_nothing_is_found_or_swapped_without_prefix_caching():
    pool = BlockPool(2, enable_prefix_caching=False)
    one, other = pool.take(2)
    assert pool.register(one, b"a") == one
    assert pool.register(other, b"a") == other
    assert pool.find(b"a") is None
    assert pool.num_cached == 0


def test_reset_forgets_all_content_and_loses_no_block():
    pool = BlockPool(3)
    pool.give_back(cached(pool, b"a", b"b"))
    assert pool.reset_prefix_cache()
    assert pool.find(b"a") is None
    assert pool.num_cached == 0
    assert len(pool.take(3)) == 3


def test_reset_is_refused_while_a_block_is_referenced():
    pool = BlockPool(2)
    a, b = cached(pool, b"a", b"b")
    pool.give_back([b])
    assert not pool.reset_prefix_cache()
    assert pool.find(b"a") == a
    assert pool.find(b"b") == b


@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(lambda pool, free, mutable, shared: pool.share(free), id="share a free block"),
        pytest.param(lambda pool, free, mutable, shared: pool.share(mutable), id="share a mutable block"),
        pytest.param(lambda pool, free, mutable, shared: pool.give_back([mutable, free]), id="give back a free block"),
        pytest.param(lambda pool, free, mutable, shared: pool.give_back([shared, shared]), id="give back twice"),
        pytest.param(lambda pool, free, mutable, shared: pool.register(free, b"b"), id="register a free block"),
        pytest.param(lambda pool, free, mutable, shared: pool.register(shared, b"b"), id="register a shared block"),
        pytest.param(lambda pool, free, mutable, shared: pool.take(-1), id="take a negative number"),
    ],
)
def test_misuse_is_refused_and_changes_nothing(misuse):
    pool = BlockPool(3)
    mutable, shared, free = pool.take(3)
    pool.give_back([free])
    pool.register(shared, b"a")
    pool.share(shared)
    with pytest.raises(AccountingError):
        misuse(pool, free, mutable, shared)
    pool.check_integrity([[mutable, shared], [shared]])
    assert pool.num_free == 1
    assert pool.find(b"b") is None


def test_cached_block_cannot_be_registered_for_other_content():
    pool = BlockPool(1)
    (block,) = cached(pool, b"a")
    with pytest.raises(AccountingError, match="not be in the prefix cache yet"):
        pool.register(block, b"b")
    assert pool.find(b"b") is None


def test_integrity_check_finds_a_leaked_block():
    pool = BlockPool(2)
    pool.take(1)
    pool.check_integrity()
    with pytest.raises(AccountingError, match="1 references but has 0 holders"):
        pool.check_integrity([])


def test_integrity_check_finds_a_block_held_without_a_reference():
    pool = BlockPool(2)
    with pytest.raises(AccountingError, match="0 references but has 1 holders"):
        pool.check_integrity([[1]])


def test_integrity_check_finds_a_block_that_is_free_and_referenced():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool._free_uncached.append(block)
    with pytest.raises(AccountingError, match="not the unreferenced ones"):
        pool.check_integrity()


def test_integrity_check_finds_a_mutable_block_with_two_holders():
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool._num_references[block] = 2
    with pytest.raises(AccountingError, match="still mutable"):
        pool.check_integrity([[block], [block]])


def test_integrity_check_finds_cached_content_on_the_uncached_free_list():
    pool = BlockPool(2)
    pool._cache.add(0, b"a")
    with pytest.raises(AccountingError, match="free without content"):
        pool.check_integrity()


def test_integrity_check_finds_an_uncached_block_on_the_cached_free_list():
    pool = BlockPool(1)
    pool.give_back(cached(pool, b"a"))
    pool._cache.clear()
    with pytest.raises(AccountingError, match="free with content but not cached"):
        pool.check_integrity()


def test_integrity_check_finds_two_blocks_cached_for_one_content():
    pool = BlockPool(2)
    one, other = cached(pool, b"a", b"b")
    pool._cache.remove(other)
    pool._cache.add(other, b"a")
    with pytest.raises(AccountingError, match="different partners"):
        pool.check_integrity([[one, other]])


def fastest_churn(num_blocks):
    """Seconds of the fastest of many rounds that share, free and evict in a pool full of cached blocks."""
    pool = BlockPool(num_blocks)
    blocks = cached(pool, *(index.to_bytes(4) for index in range(num_blocks)))
    pool.give_back(blocks)
    fastest = float("inf")
    for block in blocks[-200:]:
        start = time.perf_counter()
        pool.share(block)
        pool.give_back([block])
        pool.give_back(pool.take(1))
        fastest = min(fastest, time.perf_counter() - start)
    return fastest


def test_operations_cost_the_same_in_a_large_pool():
    assert fastest_churn(100_000) < 20 * fastest_churn(1_000) + 20e-6
