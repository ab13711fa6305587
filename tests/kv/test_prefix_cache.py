"""Block digests name a whole prefix and its salt; the map between digests and blocks is one to one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.kv.prefix_cache import PrefixCache, block_digests, root_digest


def digests(token_ids, salt=None, block_size=4):
    return list(block_digests(root_digest(salt), token_ids, block_size=block_size))


def test_only_full_blocks_have_a_digest():
    assert [len(digests(range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_equal_prefixes_have_equal_digests_whatever_follows():
    assert digests([1, 2, 3, 4, 5, 6, 7, 8])[0] == digests([1, 2, 3, 4, 9, 9, 9, 9])[0]


def test_equal_blocks_after_different_prefixes_have_different_digests():
    assert digests([1, 1, 1, 1, 5, 6, 7, 8])[1] != digests([2, 2, 2, 2, 5, 6, 7, 8])[1]


@pytest.mark.parametrize(("one", "other"), [(None, ""), (None, "a"), ("a", "b"), ("a", "A"), (None, "unsalted")])
def test_different_salts_share_no_digest(one, other):
    assert not set(digests(range(8), one)) & set(digests(range(8), other))


def test_salt_may_hold_any_python_string():
    assert root_digest("\ud800") != root_digest("?")


def test_tokens_that_python_hashes_alike_have_different_digests():
    assert hash(-1) == hash(-2)
    assert digests([-1] * 4) != digests([-2] * 4)


def test_chain_continues_from_the_parent_it_is_given():
    whole = digests(range(12))
    assert list(block_digests(whole[0], range(4, 12), block_size=4)) == whole[1:]


def test_digests_do_not_change_from_run_to_run():
    assert digests([0, 1], "salt", block_size=2)[0].hex().startswith("0c3c26968363341a")


token_lists = st.lists(st.integers(0, 2), max_size=8)


@given(token_lists, token_lists, st.sampled_from([None, "", "x"]), st.sampled_from([None, "", "x"]))
def test_digests_are_equal_exactly_for_equal_salt_and_prefix(one, other, salt, other_salt):
    pairs = zip(digests(one, salt, 2), digests(other, other_salt, 2), strict=False)
    for index, (left, right) in enumerate(pairs):
        end = 2 * (index + 1)
        assert (left == right) == (salt == other_salt and one[:end] == other[:end])


def test_added_block_is_found_by_its_digest():
    cache = PrefixCache()
    cache.add(3, b"content")
    assert cache.find(b"content") == 3
    assert 3 in cache


def test_removed_block_is_no_longer_found():
    cache = PrefixCache()
    cache.add(3, b"content")
    cache.add(4, b"other")
    cache.remove(3)
    assert cache.find(b"content") is None
    assert 3 not in cache
    assert cache.find(b"other") == 4


def test_cleared_cache_is_empty():
    cache = PrefixCache()
    cache.add(3, b"content")
    cache.clear()
    assert len(cache) == 0
    assert cache.find(b"content") is None
    assert 3 not in cache


def test_second_block_with_the_same_digest_breaks_the_one_to_one_map():
    cache = PrefixCache()
    cache.add(3, b"content")
    assert cache.is_one_to_one()
    cache.add(4, b"content")
    assert not cache.is_one_to_one()
