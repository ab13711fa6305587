"""Random lives of many block tables on a small pool, against a model that remembers what each place was written for.

The model holds, for every cache place, the (salt, tokens up to and including this one) that a step
computed there. Whatever the tables do, every committed token must be found where its table says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from forerun.kv import block_table as block_table_module
from forerun.kv.block_pool import AccountingError, BlockPool
from forerun.kv.block_table import BlockTable

BLOCK = 2
NUM_BLOCKS = 8
NUM_SEQUENCES = 3
MAX_LENGTH = NUM_BLOCKS * BLOCK

rows = st.integers(0, NUM_SEQUENCES - 1)
salts = st.sampled_from([None, None, "salt"])
tokens = st.sampled_from([0, 0, 0, 1])  # few, so that prefixes often agree
prompts = st.lists(tokens, min_size=3, max_size=9)
chunks = st.integers(1, 6)
drafts = st.lists(tokens, max_size=4)


@dataclass
class Row:
    """A sequence as an engine knows it: its tokens, and what the step in flight wrote for it."""

    table: BlockTable
    salt: str | None
    token_ids: list[int]
    tail: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)


def match(table, token_ids):
    """Look up what is cached of `token_ids`."""
    return table.match(table.prefix_digests(token_ids))


class BlockTableMachine(RuleBasedStateMachine):
    """An engine in small: sequences come, match, compute chunks and drafts, are preempted, and go."""

    pool_class: type[BlockPool] = BlockPool
    table_class: type[BlockTable] = BlockTable

    def __init__(self) -> None:
        super().__init__()
        self.pool = self.pool_class(NUM_BLOCKS)
        self.rows: list[Row] = []
        self.places: dict[int, tuple[str | None, tuple[int, ...]]] = {}

    def new_row(self, salt: str | None, prompt: list[int]) -> Row:
        return Row(self.table_class(self.pool, block_size=BLOCK, cache_salt=salt), salt, prompt)

    @initialize(arrivals=st.tuples(*[st.tuples(salts, prompts)] * NUM_SEQUENCES))
    def start(self, arrivals):
        self.rows = [self.new_row(salt, prompt) for salt, prompt in arrivals]

    @rule(index=rows, salt=salts, prompt=prompts)
    def finish_and_start_another(self, index, salt, prompt):
        self.rows[index].table.free()
        self.rows[index] = self.new_row(salt, prompt)

    @rule(index=rows)
    def match(self, index):
        row = self.rows[index]
        if row.table.num_blocks:
            with pytest.raises(AccountingError):
                match(row.table, row.token_ids)
            return
        at_least = max((self.shared_prefix(row, other) for other in self.rows), default=0)
        num_matched = match(row.table, row.token_ids)
        assert num_matched == row.table.num_computed
        assert num_matched % BLOCK == 0
        assert at_least <= num_matched < len(row.token_ids)

    @rule(chunk=chunks, draft=drafts, num_accepted=st.integers(0, 4), own_token=tokens)
    def step_all(self, chunk, draft, num_accepted, own_token):
        """One step of an engine: all sequences match and write, then all commit; who gets no room gives way."""
        for index, row in enumerate(self.rows):
            if not row.table.num_blocks:
                self.match(index)
            if not self.write(row, chunk, draft):
                self.preempt(index)
        for row in self.rows:
            self.commit(row, num_accepted, own_token)

    @rule(index=rows, chunk=chunks, draft=drafts)
    def compute(self, index, chunk, draft):
        self.write(self.rows[index], chunk, draft)

    @rule(index=rows, num_accepted=st.integers(0, 4), own_token=tokens)
    def verify(self, index, num_accepted, own_token):
        self.commit(self.rows[index], num_accepted, own_token)

    def write(self, row, chunk, draft):
        """Write KV for the next committed tokens, and for a draft if they reach the sequence's end."""
        start = row.table.num_computed
        tail = row.token_ids[start : start + chunk]
        draft = draft if start + len(tail) == len(row.token_ids) else []
        before = (list(row.table.block_ids), start, self.pool.num_free)
        num_missing = -(-(start + len(tail) + len(draft)) // BLOCK) - len(row.table.block_ids)
        if not row.table.allocate(len(tail) + len(draft)):
            assert num_missing > self.pool.num_free
            assert (list(row.table.block_ids), row.table.num_computed, self.pool.num_free) == before
            return False
        assert len(row.table.block_ids) == len(before[0]) + max(0, num_missing)
        row.tail, row.draft = tail, draft
        written = row.token_ids[:start] + tail + draft
        for index, place in enumerate(row.table.slots(start, len(tail) + len(draft)), start=start):
            assert int(place) // BLOCK not in self.pool._cache, "a step wrote an immutable block"
            self.places[int(place)] = (row.salt, tuple(written[: index + 1]))
        return True

    def commit(self, row, num_accepted, own_token):
        """Commit what the step in flight computed, less the rejected draft tokens."""
        accepted = row.draft[:num_accepted]
        reaches_end = row.tail and row.table.num_computed + len(row.tail) == len(row.token_ids)
        row.table.commit(row.tail + accepted)
        if reaches_end and len(row.token_ids) + len(accepted) < MAX_LENGTH:
            row.token_ids = [*row.token_ids, *accepted, own_token]
        elif reaches_end:
            row.token_ids = row.token_ids + accepted
        row.tail, row.draft = [], []

    @rule(index=rows, excess=st.integers(1, 3))
    def commit_too_much(self, index, excess):
        row = self.rows[index]
        before = (list(row.table.block_ids), row.table.num_computed, self.pool.num_free, self.pool.num_cached)
        with pytest.raises(AccountingError):
            row.table.commit([0] * (row.table.capacity + excess))
        assert (list(row.table.block_ids), row.table.num_computed, self.pool.num_free, self.pool.num_cached) == before

    @rule(index=rows, keep=st.integers(0, 4))
    def release_surplus(self, index, keep):
        row = self.rows[index]
        keep += len(row.tail) + len(row.draft)
        capacity = row.table.capacity
        row.table.release_surplus(keep)
        assert min(keep, capacity) <= row.table.capacity < keep + BLOCK or row.table.capacity == capacity

    @rule(index=rows)
    def preempt(self, index):
        row = self.rows[index]
        row.table.free()
        assert (row.table.num_blocks, row.table.num_computed, row.table.capacity) == (0, 0, 0)
        row.tail, row.draft = [], []

    @rule()
    def reset(self):
        in_use = any(row.table.num_blocks for row in self.rows)
        assert self.pool.reset_prefix_cache() == (not in_use)
        if not in_use:
            assert self.pool.num_cached == 0
            self.places.clear()  # other weights: what was computed is wrong now

    @invariant()
    def every_committed_token_is_where_its_table_says(self):
        for row in self.rows:
            for index, place in enumerate(row.table.slots(0, row.table.num_computed)):
                assert self.places.get(int(place)) == (row.salt, tuple(row.token_ids[: index + 1]))

    @invariant()
    def no_block_is_leaked_or_held_twice_while_mutable(self):
        self.pool.check_integrity([row.table.block_ids for row in self.rows])

    @invariant()
    def full_blocks_are_immutable_and_only_they(self):
        for row in self.rows:
            num_full = row.table.num_computed // BLOCK
            cached = [block in self.pool._cache for block in row.table.block_ids]
            assert cached == [True] * num_full + [False] * (len(cached) - num_full)
            assert all(self.pool.num_references(block) == 1 for block in row.table.block_ids[num_full:])

    @invariant()
    def equal_prefixes_lie_in_the_same_blocks_and_others_never(self):
        owners: dict[tuple[str | None, tuple[int, ...]], int] = {}
        for row in self.rows:
            for index in range(row.table.num_computed // BLOCK):
                content = (row.salt, tuple(row.token_ids[: (index + 1) * BLOCK]))
                assert owners.setdefault(content, row.table.block_ids[index]) == row.table.block_ids[index]
        assert len(set(owners.values())) == len(owners)

    def shared_prefix(self, row: Row, other: Row) -> int:
        """Tokens of `row`, less the last, that `other` holds in immutable blocks now."""
        num_shared = 0
        limit = min(other.table.num_computed, len(row.token_ids) - 1) if row.salt == other.salt else 0
        while num_shared + BLOCK <= limit:
            if row.token_ids[: num_shared + BLOCK] != other.token_ids[: num_shared + BLOCK]:
                break
            num_shared += BLOCK
        return num_shared

    def teardown(self):
        for row in self.rows:
            row.table.free()
        self.pool.check_integrity([])


TestBlockTables = BlockTableMachine.TestCase
TestBlockTables.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)


# Planted defects: the machine is worth what it catches.


class TableThatWritesSharedBlocks(BlockTable):
    """The last block that is found is computed again, in place."""

    def match(self, digests):
        if super().match(digests):
            self._digests.pop()
            self.num_computed -= BLOCK
        return self.num_computed


class TableThatSharesItsPartialBlock(BlockTable):
    """A block is made findable before it is full."""

    def commit(self, token_ids):
        super().commit(token_ids)
        if self._partial and self.block_ids[len(self._digests)] not in self._pool._cache:
            digests = block_table_module.block_digests(self._root, [*self._partial, 0], block_size=BLOCK)
            index = len(self._digests)
            self.block_ids[index] = self._pool.register(self.block_ids[index], next(digests))


class TableThatForgetsItsSurplus(BlockTable):
    """Reserved blocks are dropped from the table but not given back."""

    def release_surplus(self, keep=0):
        self.num_blocks = min(self.num_blocks, self._num_blocks_for(self.num_computed + keep))


class TableThatKeepsFreedTokens(BlockTable):
    """What was freed leaves the tokens of its partial block behind."""

    def free(self):
        partial = list(self._partial)
        super().free()
        self._partial = partial


class TableThatIgnoresItsSalt(BlockTable):
    def __init__(self, pool, *, block_size, cache_salt=None):
        super().__init__(pool, block_size=block_size)


class PoolThatSwapsWithoutRepointing(BlockPool):
    """The duplicate is given back, but the caller goes on holding it."""

    def register(self, block, digest):
        super().register(block, digest)
        return block


class PoolThatKeepsTheDuplicate(BlockPool):
    """The caller is pointed to the canonical block, but its duplicate is never given back."""

    def register(self, block, digest):
        canonical = super().register(block, digest)
        if canonical != block:
            self._free_uncached.remove(block)
            self._num_references[block] = 1
        return canonical


class PoolThatFindsEvictedBlocks(BlockPool):
    """An evicted block keeps its entry in the prefix cache."""

    def _evict(self):
        block, _ = self._free_cached.popitem(last=False)
        return block


PLANTED = [
    {"table_class": TableThatWritesSharedBlocks},
    {"table_class": TableThatSharesItsPartialBlock},
    {"table_class": TableThatForgetsItsSurplus},
    {"table_class": TableThatKeepsFreedTokens},
    {"table_class": TableThatIgnoresItsSalt},
    {"pool_class": PoolThatSwapsWithoutRepointing},
    {"pool_class": PoolThatKeepsTheDuplicate},
    {"pool_class": PoolThatFindsEvictedBlocks},
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: next(iter(planted.values())).__name__)
def test_machine_catches_planted_defect(planted):
    machine = type("Defective", (BlockTableMachine,), planted)
    search = settings(
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=300,
        stateful_step_count=40,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, AccountingError)):
        run_state_machine_as_test(machine, settings=search)


def test_machine_catches_digests_without_a_chain(monkeypatch):
    chained = block_table_module.block_digests

    def unchained(parent, token_ids, *, block_size):
        for start in range(0, len(token_ids) - block_size + 1, block_size):
            yield from chained(b"root", token_ids[start : start + block_size], block_size=block_size)

    monkeypatch.setattr(block_table_module, "block_digests", unchained)
    test_machine_catches_planted_defect({})
