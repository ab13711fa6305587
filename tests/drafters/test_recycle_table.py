"""The table knows what was learnt last, shares nothing between salts, and stays within its bytes."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forerun.drafters.recycle_table import GAP_STEPS, RecycleTable, SaltContexts
from tests.drafters.naive_recycle import UnboundedTable, verified
from tests.memory import bytes_kept

CANDIDATES, LOGITS = [1, 2, 3, 4, 5, 6, 7, 8], [9.0, 8.0, 7.5, 7.0, 6.0, 5.0, 2.0, -90.0]
SMALLEST = SaltContexts(None, num_candidates=8).num_bytes  # one salt's tables at the beginning


def row(previous, token, first=1):
    return previous, token, [first, *range(50, 57)], LOGITS


def table(max_bytes=1 << 20, vocab_size=1000):
    return RecycleTable(vocab_size=vocab_size, max_bytes=max_bytes)


def test_two_tokens_are_found_before_one():
    learnt = table()
    learnt.learn(verified([row(5, 6, 1), row(7, 6, 2)]))
    assert learnt.look_up(5, 6, None)[:2] == (2, (1, *range(50, 57)))
    assert learnt.look_up(7, 6, None).token_ids[0] == 2
    assert learnt.look_up(8, 6, None)[:2] == (1, (2, *range(50, 57)))
    assert learnt.look_up(-1, 6, None).context_length == 1
    assert learnt.look_up(6, 5, None) is None


def test_the_latest_candidates_of_a_context_replace_the_earlier_in_one_step_and_in_two():
    learnt = table()
    learnt.learn(verified([row(5, 6, 1), row(5, 6, 2)]))
    assert learnt.look_up(5, 6, None).token_ids[0] == 2
    learnt.learn(verified([row(5, 6, 3)]))
    assert learnt.look_up(5, 6, None).token_ids[0] == 3


def test_a_token_at_the_beginning_of_a_text_is_learnt_as_one_token_alone():
    learnt = table()
    learnt.learn(verified([row(-1, 0), row(0, 1)]))
    assert learnt.look_up(-1, 0, None).context_length == 1
    assert learnt.look_up(0, 0, None).context_length == 1
    assert learnt.look_up(0, 1, None).context_length == 2


def test_a_row_with_more_candidates_than_the_table_keeps_is_cut():
    learnt = table(vocab_size=3)
    assert learnt.num_candidates == 3
    learnt.learn(verified([(1, 2, [2, 1, 0, 0], [3.0, 2.0, 1.0, 1.0])]))
    assert learnt.look_up(1, 2, None).token_ids == (2, 1, 0)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_probabilities_are_those_of_the_kept_logits_to_within_their_quantisation(temperature):
    learnt = table()
    learnt.learn(verified([(1, 2, CANDIDATES, LOGITS)]))
    found = learnt.look_up(1, 2, None).probabilities(temperature)
    weights = [math.exp(logit / temperature) for logit in LOGITS]
    exact = [weight / sum(weights) for weight in weights]
    assert found == pytest.approx(exact, rel=math.expm1(1 / (GAP_STEPS * temperature)), abs=1e-4)


def test_logits_that_are_no_numbers_do_no_harm():
    learnt = table()
    learnt.learn(verified([(1, 2, CANDIDATES, [math.nan] * 8), (3, 4, CANDIDATES, [1.0, *[-math.inf] * 7])]))
    assert learnt.look_up(1, 2, None).gaps == (255,) * 8
    assert learnt.look_up(3, 4, None).gaps == (0, *[255] * 7)


def test_salts_share_nothing():
    learnt = table()
    learnt.learn(verified([row(1, 2, 1), row(1, 2, 2), row(3, 4, 3)], [(0, 1, None), (1, 2, "a"), (2, 3, None)]))
    assert learnt.look_up(1, 2, None).token_ids[0] == 1
    assert learnt.look_up(1, 2, "a").token_ids[0] == 2
    assert learnt.look_up(3, 4, "a") is None
    assert learnt.look_up(1, 2, "b") is None


def test_the_salt_learnt_for_longest_ago_makes_room():
    learnt = table(max_bytes=int(2.5 * SMALLEST))
    for salt in ("a", "b", "a", "c"):
        learnt.learn(verified([row(1, 2)], [(0, 1, salt)]))
    assert [learnt.look_up(1, 2, salt) is not None for salt in ("a", "b", "c")] == [True, False, True]


def test_one_salt_cannot_take_all_the_memory():
    learnt = table(max_bytes=8 * SMALLEST, vocab_size=50_000)
    learnt.learn(verified([row(1, 2)], [(0, 1, "small")]))
    source = random.Random(0)
    for _ in range(100):
        learnt.learn(verified([row(source.randrange(50_000), source.randrange(50_000)) for _ in range(64)]))
    assert learnt.num_bytes > 4 * SMALLEST
    assert learnt.look_up(1, 2, "small") is not None


def test_a_salt_longer_than_the_budget_keeps_nothing_and_costs_nobody_else():
    learnt, endless = table(max_bytes=2 * SMALLEST), "b" * 3 * SMALLEST
    learnt.learn(verified([row(1, 2)], [(0, 1, "a")]))
    learnt.learn(verified([row(1, 2)], [(0, 1, endless)]))
    assert learnt.look_up(1, 2, endless) is None
    assert learnt.look_up(1, 2, "a") is not None
    saved = learnt.to_arrays()
    again = table(max_bytes=2 * SMALLEST)
    again.from_arrays({endless: saved["a"], **saved})
    assert again.look_up(1, 2, "a") is not None


@pytest.mark.parametrize("max_bytes", [0, SMALLEST - 1])
def test_a_budget_too_small_for_anything_keeps_nothing_and_works(max_bytes):
    learnt = table(max_bytes=max_bytes)
    learnt.learn(verified([row(1, 2)]))
    assert learnt.look_up(1, 2, None) is None
    assert learnt.num_bytes == 0


@pytest.mark.parametrize("max_bytes", [100_000, 3_000_000])
def test_real_memory_stays_within_the_budget_while_the_table_fills_and_salts_change(max_bytes):
    source = np.random.default_rng(0)
    table(vocab_size=49_152).learn(verified([row(1, 2)]))  # what is made at the first use is not the table's
    with bytes_kept() as kept:
        learnt = table(max_bytes=max_bytes, vocab_size=49_152)
        for step in range(400):
            tokens = source.integers(0, 49_152, (256, 2)).tolist()
            learnt.learn(verified([row(*pair) for pair in tokens], [(0, 256, None if step % 8 else str(step))]))
        del tokens
        assert kept() <= max_bytes
    assert learnt.num_bytes <= max_bytes
    assert max_bytes / 4 < learnt.num_bytes


def test_growing_keeps_what_was_learnt():
    learnt, source = table(max_bytes=1 << 26, vocab_size=30_000), random.Random(1)
    contexts = list({(source.randrange(30_000), source.randrange(30_000)) for _ in range(20_000)})
    found = 0
    for i, (previous, token) in enumerate(contexts):
        learnt.learn(verified([row(previous, token, i)]))
    for i, (previous, token) in enumerate(contexts):
        candidates = learnt.look_up(previous, token, None)
        if candidates is not None and candidates.context_length == 2:
            assert candidates.token_ids[0] == i
            found += 1
    assert found > 0.8 * len(contexts), "most contexts keep their slot while at most one in four is taken"


def test_what_was_saved_is_found_again_salt_by_salt():
    learnt, source = table(max_bytes=1 << 22), random.Random(2)
    contexts = [(source.randrange(-1, 999), source.randrange(999)) for _ in range(2000)]
    for i, pair in enumerate(contexts):
        learnt.learn(verified([row(*pair, i % 999)], [(0, 1, str(i % 3))]))
    again = table(max_bytes=1 << 22)
    again.from_arrays(learnt.to_arrays())
    for i, pair in enumerate(contexts):
        found, saved = again.look_up(*pair, str(i % 3)), learnt.look_up(*pair, str(i % 3))
        assert found == saved
    assert list(again._salts) == list(learnt._salts), "the salt used for longest ago is still the first to go"


def test_a_smaller_budget_takes_in_what_it_can():
    learnt = table(max_bytes=1 << 22)
    for i in range(2000):
        learnt.learn(verified([row(i % 999, (7 * i) % 999)]))
    for max_bytes in (0, SMALLEST, 3 * SMALLEST):
        again = table(max_bytes=max_bytes)
        again.from_arrays(learnt.to_arrays())
        assert again.num_bytes <= max_bytes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ones", np.array([1000], np.int32)),
        ("ones", np.array([-1], np.int32)),
        ("twos", np.array([1], np.int32)),
        ("twos", np.array([[1, 1000]], np.int32)),
        ("ones_candidates", np.full((1, 8), 1000, np.int32)),
        ("ones_candidates", np.zeros((1, 7), np.int32)),
        ("ones_candidates", np.zeros(8, np.int32)),
        ("ones_candidates", np.full((1, 8), np.nan)),
        ("twos", np.full((1, 2), np.nan)),
        ("twos_gaps", np.zeros((2, 8), np.uint8)),
        ("twos_gaps", np.full((1, 8), 300, np.int32)),
    ],
    ids=str,
)
def test_arrays_that_no_table_gives_are_refused_and_change_nothing(name, value):
    learnt = table()
    learnt.learn(verified([row(1, 2)]))
    saved = learnt.to_arrays()[None]
    again = table()
    with pytest.raises(ValueError, match=r"contexts|token ids"):
        again.from_arrays({"good": saved, None: saved | {name: value}})
    assert again.num_bytes == 0


tokens = st.integers(0, 40)
logits = st.lists(st.integers(-30 * GAP_STEPS, 30 * GAP_STEPS), min_size=8, max_size=8).map(
    lambda many: [gap / GAP_STEPS for gap in sorted(many, reverse=True)]
)
rows = st.lists(
    st.tuples(st.integers(-1, 40), tokens, st.lists(tokens, min_size=8, max_size=8), logits), min_size=1, max_size=6
)
salts = st.sampled_from([None, "a", "b", "c"])


class TableMachine(RuleBasedStateMachine):
    """Learns and looks up, beside a table that never forgets: what is found is right, and what was learnt last is found."""

    def __init__(self):
        super().__init__()
        self.table = RecycleTable(vocab_size=41, max_bytes=int(2.5 * SMALLEST))
        self.naive = UnboundedTable()

    @rule(first=rows, first_salt=salts, second=rows, second_salt=salts)
    def learn(self, first, first_salt, second, second_salt):
        parts = [(0, len(first), first_salt), (len(first), len(first) + len(second), second_salt)]
        self.table.learn(verified([*first, *second], parts))
        self.naive.learn(first, first_salt)
        self.naive.learn(second, second_salt)
        previous, token, *_ = second[-1]
        assert self.table.look_up(previous, token, second_salt) == self.naive.look_up(previous, token, second_salt)

    @rule(previous=st.integers(-1, 40), token=tokens, salt=salts)
    def look_up(self, previous, token, salt):
        found = self.table.look_up(previous, token, salt)
        if found is not None:
            context = (previous, token) if found.context_length == 2 else (-1, token)
            assert found[1:] == self.naive.known[(salt, *context)]

    @rule()
    def save_and_load(self):
        saved = self.table.to_arrays()
        self.table = RecycleTable(vocab_size=41, max_bytes=int(2.5 * SMALLEST))
        self.table.from_arrays(saved)

    @invariant()
    def bytes_are_within_the_budget(self):
        assert self.table.num_bytes == sum(contexts.num_bytes for contexts in self.table._salts.values())
        assert self.table.num_bytes <= 2.5 * SMALLEST


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
