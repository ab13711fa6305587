"""A table charges only committed tokens, shares only full blocks, and forgets nothing it gave away."""

import pytest

from forerun.kv.block_pool import AccountingError, BlockPool
from forerun.kv.block_table import BlockTable

BLOCK = 4
TOKENS = list(range(100, 164))


def make_pool(num_blocks=10, **options):
    return BlockPool(num_blocks, **options)


def make_table(pool, salt=None):
    return BlockTable(pool, block_size=BLOCK, cache_salt=salt)


def match(table, token_ids):
    """Look up what is cached of `token_ids`."""
    return table.match(table.prefix_digests(token_ids))


def filled(pool, token_ids, salt=None):
    """A table that computed `token_ids` and holds no surplus."""
    table = make_table(pool, salt)
    assert table.allocate(len(token_ids))
    table.commit(token_ids)
    table.release_surplus()
    return table


def num_immutable(table, pool):
    """Leading blocks of a table that are in the prefix cache, which nobody writes."""
    flags = [block in pool._cache for block in table.block_ids]
    assert flags == sorted(flags, reverse=True)
    return sum(flags)


def state(table, pool):
    """All that a caller can see of a table and its pool."""
    references = [pool.num_references(block) for block in range(pool.num_blocks)]
    return (
        list(table.block_ids),
        table.num_computed,
        table.capacity,
        num_immutable(table, pool),
        pool.num_free,
        references,
    )


# --- allocate -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_allocate_reserves_the_fewest_blocks_that_hold_the_tokens(num_tokens, num_blocks):
    table = make_table(make_pool())
    assert table.allocate(num_tokens)
    assert len(table.block_ids) == num_blocks
    assert table.capacity == num_blocks * BLOCK


def test_allocate_within_the_capacity_takes_nothing():
    pool = make_pool()
    table = filled(pool, TOKENS[:5])
    before = state(table, pool)
    assert table.allocate(3)
    assert state(table, pool) == before


def test_allocate_zero_changes_nothing():
    pool = make_pool()
    table = filled(pool, TOKENS[:8])
    before = state(table, pool)
    assert table.allocate(0)
    assert state(table, pool) == before


def test_exhausted_pool_answers_false_and_changes_nothing():
    pool = make_pool(3)
    table = filled(pool, TOKENS[:6])
    before = state(table, pool)
    assert not table.allocate(7)
    assert state(table, pool) == before
    assert table.allocate(6)


def test_small_allocation_after_an_unused_large_one_takes_nothing():
    pool = make_pool()
    table = filled(pool, TOKENS[:4])
    table.allocate(6)
    table.commit(TOKENS[4:6])
    before = state(table, pool)
    assert table.allocate(1)
    assert state(table, pool) == before


# --- commit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", range(1, 13))
def test_immutable_blocks_are_the_full_ones(num_tokens):
    pool = make_pool()
    table = filled(pool, TOKENS[:num_tokens])
    assert num_immutable(table, pool) == num_tokens // BLOCK


@pytest.mark.parametrize("num_tokens", [1, 3, 5, 7])
def test_partial_block_stays_mutable_with_one_holder(num_tokens):
    pool = make_pool()
    table = filled(pool, TOKENS[:num_tokens])
    assert num_immutable(table, pool) == len(table.block_ids) - 1
    assert pool.num_references(table.block_ids[-1]) == 1


def test_empty_commit_changes_nothing():
    pool = make_pool()
    table = filled(pool, TOKENS[:5])
    before = state(table, pool)
    table.commit([])
    assert state(table, pool) == before


def test_commit_beyond_the_capacity_is_refused_and_changes_nothing():
    pool = make_pool()
    table = filled(pool, TOKENS[:5])
    before = state(table, pool)
    with pytest.raises(AccountingError, match="got 4 tokens for 3 places"):
        table.commit(TOKENS[5:9])
    assert state(table, pool) == before
    assert pool.num_cached == 1


def test_commit_of_something_that_is_no_token_id_changes_nothing():
    pool = make_pool()
    table = filled(pool, TOKENS[:2])
    table.allocate(6)
    before = state(table, pool)
    with pytest.raises(Exception, match="integer"):
        table.commit([*TOKENS[2:7], "word"])
    assert state(table, pool) == before
    table.commit(TOKENS[2:8])
    assert match(make_table(pool), TOKENS) == 8


def test_over_allocation_charges_only_what_is_committed():
    pool = make_pool()
    table = filled(pool, TOKENS[:4])
    table.allocate(6)
    table.commit(TOKENS[4:6])
    assert table.num_computed == 6
    assert num_immutable(table, pool) == 1
    assert table.capacity >= 4


def test_chunk_that_ends_the_prompt_and_begins_the_output_fills_blocks_as_any_other():
    pool = make_pool()
    table = filled(pool, TOKENS[:6])
    table.allocate(3)
    assert (num_immutable(table, pool), len(table.block_ids)) == (1, 3)
    table.commit(TOKENS[6:9])
    assert (num_immutable(table, pool), len(table.block_ids)) == (2, 3)


def test_chunk_size_does_not_change_what_is_shared():
    pool = make_pool()
    whole = filled(pool, TOKENS[:12])
    pieces = make_table(pool)
    for start, end in [(0, 1), (1, 6), (6, 7), (7, 12)]:
        pieces.allocate(end - start)
        pieces.commit(TOKENS[start:end])
    assert list(pieces.block_ids) == list(whole.block_ids)


def test_identical_tokens_and_salt_share_full_blocks_and_no_partial_one():
    pool = make_pool()
    one, other = filled(pool, TOKENS[:10], "s"), filled(pool, TOKENS[:10], "s")
    assert list(one.block_ids[:2]) == list(other.block_ids[:2])
    assert one.block_ids[2] != other.block_ids[2]


def test_duplicate_of_a_cached_block_is_given_back():
    pool = make_pool()
    filled(pool, TOKENS[:8])
    filled(pool, TOKENS[:8])
    assert pool.num_free == 8


@pytest.mark.parametrize(
    ("token_ids", "salt"),
    [
        pytest.param(TOKENS[:8], "other", id="salt"),
        pytest.param(TOKENS[:8], None, id="no salt"),
        pytest.param([0, *TOKENS[1:8]], "s", id="first token"),
        pytest.param(TOKENS[4:8] + TOKENS[:4], "s", id="block order"),
    ],
)
def test_different_tokens_or_salt_never_share(token_ids, salt):
    pool = make_pool()
    one, other = filled(pool, TOKENS[:8], "s"), filled(pool, token_ids, salt)
    assert not set(one.block_ids) & set(other.block_ids)


def test_nothing_is_shared_without_prefix_caching():
    pool = make_pool(enable_prefix_caching=False)
    one, other = filled(pool, TOKENS[:8]), filled(pool, TOKENS[:8])
    assert not set(one.block_ids) & set(other.block_ids)
    assert match(make_table(pool), TOKENS) == 0


# --- match --------------------------------------------------------------------------------------


def test_match_claims_the_cached_prefix():
    pool = make_pool()
    first = filled(pool, TOKENS[:10])
    second = make_table(pool)
    assert match(second, TOKENS[:12]) == second.num_computed == 8
    assert list(second.block_ids) == list(first.block_ids[:2])
    assert second.capacity == 0


@pytest.mark.parametrize(("num_tokens", "num_matched"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_match_leaves_at_least_one_token_to_compute(num_tokens, num_matched):
    pool = make_pool()
    filled(pool, TOKENS[:12])
    assert match(make_table(pool), TOKENS[:num_tokens]) == num_matched


def test_match_stops_at_the_first_difference():
    pool = make_pool()
    filled(pool, TOKENS[:12])
    assert match(make_table(pool), [*TOKENS[:6], 0, *TOKENS[7:12]]) == 4


def test_match_survives_the_end_of_the_sequence_that_computed_the_blocks():
    pool = make_pool()
    filled(pool, TOKENS[:8]).free()
    table = make_table(pool)
    assert match(table, TOKENS[:9]) == 8
    pool.check_integrity([table.block_ids])


def test_match_on_a_table_with_blocks_is_refused_and_changes_nothing():
    pool = make_pool()
    filled(pool, TOKENS[:8])
    table = filled(pool, TOKENS[20:21])
    before = state(table, pool)
    with pytest.raises(AccountingError, match="free it first"):
        match(table, TOKENS[:9])
    assert state(table, pool) == before


def test_match_of_something_that_is_no_token_id_changes_nothing():
    pool = make_pool()
    filled(pool, TOKENS[:8])
    table = make_table(pool)
    before = state(table, pool)
    with pytest.raises(Exception, match="integer"):
        match(table, [*TOKENS[:7], None, 1])
    assert state(table, pool) == before


def test_decode_continues_after_a_cache_hit():
    pool = make_pool()
    filled(pool, TOKENS[:8])
    table = make_table(pool)
    match(table, TOKENS[:10])
    table.allocate(2)
    table.commit(TOKENS[8:10])
    for token in TOKENS[10:13]:
        assert table.allocate(1)
        table.commit([token])
    assert (table.num_computed, num_immutable(table, pool), len(table.block_ids)) == (13, 3, 4)
    assert match(make_table(pool), TOKENS) == 12


# --- release_surplus, free ----------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "num_blocks"), [(0, 2), (2, 2), (3, 3), (6, 3), (100, 5)])
def test_release_surplus_keeps_the_computed_blocks_and_those_asked_for(keep, num_blocks):
    pool = make_pool()
    table = filled(pool, TOKENS[:6])
    table.allocate(14)
    table.release_surplus(keep)
    assert (len(table.block_ids), pool.num_free) == (num_blocks, 10 - num_blocks)
    assert table.num_computed == 6


def test_rejected_draft_leaves_no_block_behind():
    pool = make_pool()
    table = filled(pool, TOKENS[:4])
    table.allocate(9)
    table.commit(TOKENS[4:5])
    table.release_surplus()
    assert len(table.block_ids) == 2
    pool.check_integrity([table.block_ids])


def test_negative_amounts_are_refused_and_change_nothing():
    pool = make_pool()
    table = filled(pool, TOKENS[:6])
    before = state(table, pool)
    with pytest.raises(AccountingError, match="allocate"):
        table.allocate(-1)
    with pytest.raises(AccountingError, match="release_surplus"):
        table.release_surplus(-3)
    assert state(table, pool) == before


def test_free_leaves_an_empty_table_and_no_reference():
    pool = make_pool()
    table = filled(pool, TOKENS[:6])
    table.allocate(10)
    table.free()
    assert state(table, pool) == ([], 0, 0, 0, 10, [0] * 10)


def test_freeing_twice_is_harmless():
    pool = make_pool()
    table = filled(pool, TOKENS[:6])
    table.free()
    table.free()
    pool.check_integrity([])


def test_tail_of_a_freed_sequence_is_evicted_before_its_head():
    pool = make_pool(4)
    filled(pool, TOKENS[:16]).free()
    pool.take(1)
    assert match(make_table(pool), TOKENS) == 12


def test_preempted_sequence_recomputes_across_the_prompt_end_in_any_chunks():
    pool = make_pool()
    table = filled(pool, TOKENS[:6])  # the prompt
    for token in TOKENS[6:11]:  # the output
        table.allocate(1)
        table.commit([token])
    table.free()
    filled(pool, range(40)).free()  # evicts everything
    assert match(table, TOKENS[:11]) == 0
    for start, end in [(0, 5), (5, 8), (8, 11)]:  # the second chunk ends inside the output
        assert table.allocate(end - start)
        table.commit(TOKENS[start:end])
    assert (table.num_computed, num_immutable(table, pool)) == (11, 2)
    assert match(make_table(pool), TOKENS) == 8


def test_preempted_sequence_finds_its_own_blocks_again():
    pool = make_pool()
    table = filled(pool, TOKENS[:11])
    block_ids = list(table.block_ids)
    table.free()
    assert match(table, TOKENS[:11]) == 8
    assert list(table.block_ids) == block_ids[:2]


# --- slots --------------------------------------------------------------------------------------


def test_slots_are_block_times_size_plus_offset():
    table = make_table(make_pool())
    table.allocate(12)
    table.block_ids[:] = [7, 2, 5]
    assert table.slots(0, 12) == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21, 22, 23]
    assert table.slots(3, 2) == [31, 8]
    assert table.slots(6, 1) == [10]
    assert table.slots(12, 0) == []


@pytest.mark.parametrize(("start", "count"), [(0, 9), (8, 1), (-1, 1), (2, -1)])
def test_slots_that_are_not_reserved_are_refused(start, count):
    table = make_table(make_pool())
    table.allocate(8)
    with pytest.raises(AccountingError, match="must be within 0 to 8"):
        table.slots(start, count)
