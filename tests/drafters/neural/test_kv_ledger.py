"""The ledger never takes an entry for another text's, and forgets none that is still there."""

from __future__ import annotations

import random

import pytest

from forerun.drafters.neural.kv import KVLedger
from tests.drafters.texts import sequence

SIZE = 4


class Memory:
    """What a drafter's entries really are: for each place the text up to it."""

    def __init__(self, num_blocks):
        self.entries = {}
        self.ledger = KVLedger(num_blocks, block_size=SIZE)

    def write(self, text, table, start, end):
        tokens = text.tokens_from(0)
        for place in range(start, end):
            self.entries[table[place // SIZE], place % SIZE] = (text.cache_salt, tuple(tokens[: place + 1]))
        self.ledger.note(text, table, start, end)

    def num_really_valid(self, text, table, num_computed):
        tokens = text.tokens_from(0)
        for place in range(num_computed):
            wanted = (text.cache_salt, tuple(tokens[: place + 1]))
            if self.entries.get((table[place // SIZE], place % SIZE)) != wanted:
                return place
        return num_computed


def blocks_for(num_tokens):
    return -(-num_tokens // SIZE)


@pytest.mark.parametrize("seed", range(40))
def test_what_counts_as_valid_is_valid_whatever_becomes_of_the_blocks(seed):
    source = random.Random(seed)
    memory = Memory(12)
    texts = [sequence([1, 2, 3, 4, 5], seq_id=i, salt=source.choice([None, "a"])) for i in range(3)]
    tables = {text.seq_id: source.sample(range(12), 12) for text in texts}
    for text in texts:
        memory.ledger.start(text)
    for _ in range(60):
        text = source.choice(texts)
        if source.random() < 0.2:  # preempted: it comes back with other blocks
            tables[text.seq_id] = source.sample(range(12), 12)
        if len(text) < 40:
            text.output_ids += [source.randrange(2) for _ in range(source.randrange(6))]
        table, num_computed = tables[text.seq_id], source.randint(1, len(text))
        valid = memory.ledger.num_valid(text, table[: blocks_for(num_computed)], num_computed)
        assert valid <= memory.num_really_valid(text, table, num_computed)
        if source.random() < 0.8:
            memory.write(text, table, valid, num_computed)
            assert memory.ledger.num_valid(text, table, num_computed) == num_computed


def test_a_prefix_that_another_sequence_wrote_counts():
    memory = Memory(8)
    first, second = sequence([1] * 10, seq_id=1), sequence([1] * 8 + [2, 2], seq_id=2)
    for text in (first, second):
        memory.ledger.start(text)
    memory.write(first, [0, 1, 2], 0, 10)
    assert memory.ledger.num_valid(second, [0, 1, 3], 10) == 8


def test_with_another_salt_it_does_not():
    memory = Memory(8)
    first, second = sequence([1] * 8, seq_id=1), sequence([1] * 8, seq_id=2, salt="other")
    for text in (first, second):
        memory.ledger.start(text)
    memory.write(first, [0, 1], 0, 8)
    assert memory.ledger.num_valid(second, [0, 1], 8) == 0


def test_full_blocks_outlive_their_sequence():
    memory = Memory(8)
    first, second = sequence([1] * 9, seq_id=1), sequence([1] * 9, seq_id=2)
    memory.ledger.start(first)
    memory.write(first, [0, 1, 2], 0, 9)
    memory.ledger.stop(first)
    memory.ledger.start(second)
    assert memory.ledger.num_valid(second, [0, 1, 3], 9) == 8
