"""A slot charges only committed tokens, shares only full blocks, and forgets nothing it gave away."""

import pytest

from forerun.kv.block_pool import AccountingError, BlockPool
from forerun.kv.slots import Slot

BLOCK = 4
TOKENS = list(range(100, 164))


def make_pool(num_blocks=10, **options):
    return BlockPool(num_blocks, **options)


def make_slot(pool, salt=None):
    return Slot(pool, block_size=BLOCK, cache_salt=salt)


def filled(pool, token_ids, salt=None):
    """A slot that computed `token_ids` and holds no surplus."""
    slot = make_slot(pool, salt)
    assert slot.allocate(len(token_ids))
    slot.commit(token_ids)
    slot.release_surplus()
    return slot


def state(slot, pool):
    """All that a caller can see of a slot and its pool."""
    references = [pool.num_references(block) for block in range(pool.num_blocks)]
    return list(slot.block_ids), slot.num_computed, slot.capacity, slot.num_immutable_blocks, pool.num_free, references


# --- allocate -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_allocate_reserves_the_fewest_blocks_that_hold_the_tokens(num_tokens, num_blocks):
    slot = make_slot(make_pool())
    assert slot.allocate(num_tokens)
    assert len(slot.block_ids) == num_blocks
    assert slot.capacity == num_blocks * BLOCK


def test_allocate_within_the_capacity_takes_nothing():
    pool = make_pool()
    slot = filled(pool, TOKENS[:5])
    before = state(slot, pool)
    assert slot.allocate(3)
    assert state(slot, pool) == before


def test_allocate_zero_changes_nothing():
    pool = make_pool()
    slot = filled(pool, TOKENS[:8])
    before = state(slot, pool)
    assert slot.allocate(0)
    assert state(slot, pool) == before


def test_exhausted_pool_answers_false_and_changes_nothing():
    pool = make_pool(3)
    slot = filled(pool, TOKENS[:6])
    before = state(slot, pool)
    assert not slot.allocate(7)
    assert state(slot, pool) == before
    assert slot.allocate(6)


def test_small_allocation_after_an_unused_large_one_takes_nothing():
    pool = make_pool()
    slot = filled(pool, TOKENS[:4])
    slot.allocate(6)
    slot.commit(TOKENS[4:6])
    before = state(slot, pool)
    assert slot.allocate(1)
    assert state(slot, pool) == before


# --- commit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", range(1, 13))
def test_immutable_blocks_are_the_full_ones(num_tokens):
    pool = make_pool()
    slot = filled(pool, TOKENS[:num_tokens])
    assert slot.num_immutable_blocks == num_tokens // BLOCK
    assert [pool.is_cached(block) for block in slot.block_ids[: num_tokens // BLOCK]] == [True] * (num_tokens // BLOCK)


@pytest.mark.parametrize("num_tokens", [1, 3, 5, 7])
def test_partial_block_stays_mutable_with_one_holder(num_tokens):
    pool = make_pool()
    slot = filled(pool, TOKENS[:num_tokens])
    assert not pool.is_cached(slot.block_ids[-1])
    assert pool.num_references(slot.block_ids[-1]) == 1


def test_empty_commit_changes_nothing():
    pool = make_pool()
    slot = filled(pool, TOKENS[:5])
    before = state(slot, pool)
    slot.commit([])
    assert state(slot, pool) == before


def test_commit_beyond_the_capacity_is_refused_and_changes_nothing():
    pool = make_pool()
    slot = filled(pool, TOKENS[:5])
    before = state(slot, pool)
    with pytest.raises(AccountingError, match="got 4 tokens for 3 places"):
        slot.commit(TOKENS[5:9])
    assert state(slot, pool) == before
    assert pool.num_cached == 1


def test_commit_of_something_that_is_no_token_id_changes_nothing():
    pool = make_pool()
    slot = filled(pool, TOKENS[:2])
    slot.allocate(6)
    before = state(slot, pool)
    with pytest.raises(Exception, match="integer"):
        slot.commit([*TOKENS[2:7], "word"])
    assert state(slot, pool) == before
    slot.commit(TOKENS[2:8])
    assert make_slot(pool).match(TOKENS) == 8


def test_over_allocation_charges_only_what_is_committed():
    slot = filled(make_pool(), TOKENS[:4])
    slot.allocate(6)
    slot.commit(TOKENS[4:6])
    assert slot.num_computed == 6
    assert slot.num_immutable_blocks == 1
    assert slot.capacity >= 4


def test_chunk_that_ends_the_prompt_and_begins_the_output_fills_blocks_as_any_other():
    slot = filled(make_pool(), TOKENS[:6])
    slot.allocate(3)
    assert (slot.num_immutable_blocks, len(slot.block_ids)) == (1, 3)
    slot.commit(TOKENS[6:9])
    assert (slot.num_immutable_blocks, len(slot.block_ids)) == (2, 3)


def test_chunk_size_does_not_change_what_is_shared():
    pool = make_pool()
    whole = filled(pool, TOKENS[:12])
    pieces = make_slot(pool)
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
    assert make_slot(pool).match(TOKENS) == 0


# --- match --------------------------------------------------------------------------------------


def test_match_claims_the_cached_prefix():
    pool = make_pool()
    first = filled(pool, TOKENS[:10])
    second = make_slot(pool)
    assert second.match(TOKENS[:12]) == second.num_computed == 8
    assert list(second.block_ids) == list(first.block_ids[:2])
    assert second.capacity == 0


@pytest.mark.parametrize(("num_tokens", "num_matched"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_match_leaves_at_least_one_token_to_compute(num_tokens, num_matched):
    pool = make_pool()
    filled(pool, TOKENS[:12])
    assert make_slot(pool).match(TOKENS[:num_tokens]) == num_matched


def test_match_stops_at_the_first_difference():
    pool = make_pool()
    filled(pool, TOKENS[:12])
    assert make_slot(pool).match([*TOKENS[:6], 0, *TOKENS[7:12]]) == 4


def test_match_survives_the_end_of_the_sequence_that_computed_the_blocks():
    pool = make_pool()
    filled(pool, TOKENS[:8]).free()
    slot = make_slot(pool)
    assert slot.match(TOKENS[:9]) == 8
    pool.check_integrity([slot.block_ids])


def test_match_on_a_slot_with_blocks_is_refused_and_changes_nothing():
    pool = make_pool()
    filled(pool, TOKENS[:8])
    slot = filled(pool, TOKENS[20:21])
    before = state(slot, pool)
    with pytest.raises(AccountingError, match="free it first"):
        slot.match(TOKENS[:9])
    assert state(slot, pool) == before


def test_match_of_something_that_is_no_token_id_changes_nothing():
    pool = make_pool()
    filled(pool, TOKENS[:8])
    slot = make_slot(pool)
    before = state(slot, pool)
    with pytest.raises(Exception, match="integer"):
        slot.match([*TOKENS[:7], None, 1])
    assert state(slot, pool) == before


def test_decode_continues_after_a_cache_hit():
    pool = make_pool()
    filled(pool, TOKENS[:8])
    slot = make_slot(pool)
    slot.match(TOKENS[:10])
    slot.allocate(2)
    slot.commit(TOKENS[8:10])
    for token in TOKENS[10:13]:
        assert slot.allocate(1)
        slot.commit([token])
    assert (slot.num_computed, slot.num_immutable_blocks, len(slot.block_ids)) == (13, 3, 4)
    assert make_slot(pool).match(TOKENS) == 12


# --- release_surplus, truncate, free ------------------------------------------------------------


@pytest.mark.parametrize(("keep", "num_blocks"), [(0, 2), (2, 2), (3, 3), (6, 3), (100, 5)])
def test_release_surplus_keeps_the_computed_blocks_and_those_asked_for(keep, num_blocks):
    pool = make_pool()
    slot = filled(pool, TOKENS[:6])
    slot.allocate(14)
    slot.release_surplus(keep)
    assert (len(slot.block_ids), pool.num_free) == (num_blocks, 10 - num_blocks)
    assert slot.num_computed == 6


def test_rejected_draft_leaves_no_block_behind():
    pool = make_pool()
    slot = filled(pool, TOKENS[:4])
    slot.allocate(9)
    slot.commit(TOKENS[4:5])
    slot.release_surplus()
    assert len(slot.block_ids) == 2
    pool.check_integrity([slot.block_ids])


def test_truncate_in_the_partial_block_keeps_the_tokens_before_the_cut():
    pool = make_pool()
    slot = filled(pool, TOKENS[:7])
    assert slot.truncate(5) == slot.num_computed == 5
    slot.allocate(3)
    slot.commit(TOKENS[5:8])
    assert make_slot(pool).match(TOKENS) == 8


def test_truncated_tokens_do_not_count_for_the_content_of_a_block():
    pool = make_pool()
    slot = filled(pool, TOKENS[:7])
    slot.truncate(5)
    slot.allocate(3)
    slot.commit([1, 2, 3])
    assert make_slot(pool).match(TOKENS) == 4
    assert make_slot(pool).match([*TOKENS[:5], 1, 2, 3, 4]) == 8


@pytest.mark.parametrize(("cut", "num_left"), [(0, 0), (3, 0), (4, 4), (5, 4), (8, 8), (9, 9), (10, 10)])
def test_truncate_inside_an_immutable_block_falls_back_to_its_start(cut, num_left):
    pool = make_pool()
    slot = filled(pool, TOKENS[:10])
    assert slot.truncate(cut) == slot.num_computed == num_left
    assert slot.num_immutable_blocks == num_left // BLOCK
    assert len(slot.block_ids) == -(-num_left // BLOCK)
    pool.check_integrity([slot.block_ids])


def test_truncated_slot_does_not_write_a_block_that_another_slot_reads():
    pool = make_pool()
    reader, writer = filled(pool, TOKENS[:8]), filled(pool, TOKENS[:8])
    writer.truncate(6)
    writer.allocate(4)
    assert not set(writer.slots(writer.num_computed, 4)) & set(reader.slots(0, 8))


def test_truncate_gives_back_reserved_blocks():
    pool = make_pool()
    slot = filled(pool, TOKENS[:6])
    slot.allocate(10)
    assert slot.truncate(6) == 6
    assert pool.num_free == 8


@pytest.mark.parametrize("num_tokens", [-1, 7])
def test_truncate_outside_the_computed_tokens_is_refused_and_changes_nothing(num_tokens):
    pool = make_pool()
    slot = filled(pool, TOKENS[:6])
    before = state(slot, pool)
    with pytest.raises(AccountingError, match="must be from 0 to 6"):
        slot.truncate(num_tokens)
    assert state(slot, pool) == before


def test_negative_amounts_are_refused_and_change_nothing():
    pool = make_pool()
    slot = filled(pool, TOKENS[:6])
    before = state(slot, pool)
    with pytest.raises(AccountingError, match="allocate"):
        slot.allocate(-1)
    with pytest.raises(AccountingError, match="release_surplus"):
        slot.release_surplus(-3)
    assert state(slot, pool) == before


def test_free_leaves_an_empty_slot_and_no_reference():
    pool = make_pool()
    slot = filled(pool, TOKENS[:6])
    slot.allocate(10)
    slot.free()
    assert state(slot, pool) == ([], 0, 0, 0, 10, [0] * 10)


def test_freeing_twice_is_harmless():
    pool = make_pool()
    slot = filled(pool, TOKENS[:6])
    slot.free()
    slot.free()
    pool.check_integrity([])


def test_tail_of_a_freed_sequence_is_evicted_before_its_head():
    pool = make_pool(4)
    filled(pool, TOKENS[:16]).free()
    pool.take(1)
    assert make_slot(pool).match(TOKENS) == 12


def test_preempted_sequence_recomputes_across_the_prompt_end_in_any_chunks():
    pool = make_pool()
    slot = filled(pool, TOKENS[:6])  # the prompt
    for token in TOKENS[6:11]:  # the output
        slot.allocate(1)
        slot.commit([token])
    slot.free()
    filled(pool, range(40)).free()  # evicts everything
    assert slot.match(TOKENS[:11]) == 0
    for start, end in [(0, 5), (5, 8), (8, 11)]:  # the second chunk ends inside the output
        assert slot.allocate(end - start)
        slot.commit(TOKENS[start:end])
    assert (slot.num_computed, slot.num_immutable_blocks) == (11, 2)
    assert make_slot(pool).match(TOKENS) == 8


def test_preempted_sequence_finds_its_own_blocks_again():
    pool = make_pool()
    slot = filled(pool, TOKENS[:11])
    block_ids = list(slot.block_ids)
    slot.free()
    assert slot.match(TOKENS[:11]) == 8
    assert list(slot.block_ids) == block_ids[:2]


# --- slots --------------------------------------------------------------------------------------


def test_slots_are_block_times_size_plus_offset():
    slot = make_slot(make_pool())
    slot.allocate(12)
    slot.block_ids[:] = [7, 2, 5]
    assert slot.slots(0, 12) == [28, 29, 30, 31, 8, 9, 10, 11, 20, 21, 22, 23]
    assert slot.slots(3, 2) == [31, 8]
    assert slot.slots(6, 1) == [10]
    assert slot.slots(12, 0) == []


@pytest.mark.parametrize(("start", "count"), [(0, 9), (8, 1), (-1, 1), (2, -1)])
def test_slots_that_are_not_reserved_are_refused(start, count):
    slot = make_slot(make_pool())
    slot.allocate(8)
    with pytest.raises(AccountingError, match="must be within 0 to 8"):
        slot.slots(start, count)
