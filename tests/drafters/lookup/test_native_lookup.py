"""The compiled look-ups give the drafts and the states of the plain ones, to the bit."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.draft import Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, DraftRequest, TargetInfo, VerifiedRows
from forerun.drafters.lookup.algorithms import PlainLookup
from forerun.drafters.lookup.drafter import LookupDrafter
from forerun.drafters.lookup.hit_rates import HitRates
from forerun.drafters.lookup.live_text import LiveText
from forerun.drafters.lookup.text_index import BREAK, TextIndex
from forerun.drafters.recycle_table import PlainRows, RecycleTable
from forerun.ops.native.lookup import DraftLimits, NativeLookup
from tests.drafters.texts import sequence
from tests.native import every_level

SALTS = (None, "a")


def state_of(index: TextIndex) -> tuple[object, ...]:
    struct = index.struct
    return index.tokens.tolist(), index.places.tolist(), struct.end, struct.text_start


def state_of_text(text: LiveText) -> tuple[object, ...]:
    struct = text.struct
    copies = [(copy.place, copy.match) for copy in struct.copies]
    runners_up = [list(beside) for beside in struct.runners_up]
    computed = struct.computed[:], struct.margin_classes[:], runners_up, struct.num_computed, struct.next_computed
    return state_of(text.index), copies, computed, struct.lost_place, struct.num_since, struct.hits, struct.expected


def table_state(table: RecycleTable, salt: str | None) -> object:
    contexts = table.of(salt)
    return contexts and [(one.slots.tobytes(), one.num_used) for one in (contexts.ones, contexts.twos)]


def in_arrays(rows):
    """The same rows in arrays of the standard library, as the executor gives them."""
    kinds = ("q", rows.token_ids), ("q", rows.previous_ids), ("i", rows.candidate_ids), ("f", rows.candidate_logits)
    token_ids, previous_ids, candidate_ids, logits = (array(kind, numbers.ravel().tolist()) for kind, numbers in kinds)
    return VerifiedRows(
        token_ids=token_ids,
        previous_ids=previous_ids,
        candidate_ids=candidate_ids,
        candidate_logits=logits,
        salts=rows.salts,
    )


class Pair:
    """A plain drafter and a compiled one that get the same calls."""

    def __init__(self, kernels, *, vocab_size: int, pool_bytes: int) -> None:
        target = TargetInfo(vocab_size=vocab_size, max_model_len=4096, num_speculative_tokens=64)
        self.drafters = [
            LookupDrafter(target, table_bytes=1 << 20, pool_bytes=pool_bytes, lookup=lookup)
            for lookup in (PlainLookup(), NativeLookup(kernels))
        ]
        self.running: list[Sequence] = []
        self.num_started = 0

    def start(self, prompt: list[int], salt: str | None) -> None:
        self.num_started += 1
        self.running.append(sequence(prompt, seq_id=self.num_started, salt=salt))
        for drafter in self.drafters:
            drafter.start(self.running[-1])

    def stop(self) -> None:
        if self.running:
            ended = self.running.pop(0)
            for drafter in self.drafters:
                drafter.stop(ended)

    def commit(self, new_tokens: list[int], logits: list[float]) -> None:
        """Commit some of `new_tokens` to each sequence, and learn a row for each sequence's last tokens."""
        for place, one in enumerate(self.running):
            one.output_ids.extend(new_tokens[place:])
        if not self.running:
            return
        last = [one.tokens_from(len(one) - 2) for one in self.running]
        vocab_size = self.drafters[0].table._most_ones
        k = self.drafters[0].num_candidates
        rows = VerifiedRows(
            token_ids=np.array([tokens[-1] for tokens in last]),
            previous_ids=np.array([tokens[0] if len(tokens) > 1 else -1 for tokens in last]),
            candidate_ids=np.array(
                [[(row + 3 * i) % vocab_size for i in range(k)] for row in range(len(last))], np.int32
            ),
            candidate_logits=np.tile(np.sort(np.float32(logits[:k]))[::-1], (len(last), 1)),
            salts=[(row, row + 1, one.cache_salt) for row, one in enumerate(self.running)],
        )
        plain, compiled = self.drafters
        plain.learn(rows)
        compiled.learn(in_arrays(rows))

    def propose(self, max_tokens: int, max_depth: int) -> list[Draft]:
        requests = [DraftRequest(one, max_tokens + place, max_depth) for place, one in enumerate(self.running)]
        plain, compiled = (drafter.propose(DraftContext(requests=requests)) for drafter in self.drafters)
        assert plain == compiled
        return plain

    def join(self, chain_of_levels: list[tuple[list[int], float]], max_tokens: int) -> list[Draft]:
        """Drafts of all sequences but the first, which gets none, with a chain and its runners-up."""
        requests = [DraftRequest(one, max_tokens, 12) for one in self.running]
        levels, margins = [level for level, _ in chain_of_levels], tuple(margin for _, margin in chain_of_levels)
        parents: list[int] = []
        above, first = -1, 0
        for level in levels:
            parents += [above] * len(level)
            above, first = first, first + len(level)
        chain = Draft(tuple(token_id for level in levels for token_id in level), tuple(parents), margins=margins)
        assert chain.first_path() == levels
        chains = [chain if place else Draft() for place in range(len(requests))]
        free = [drafter.propose(DraftContext(requests=requests)) for drafter in self.drafters]
        plain, compiled = (
            drafter.join(requests, drafts, chains, computed_by="head")
            for drafter, drafts in zip(self.drafters, free, strict=True)
        )
        assert plain == compiled
        return plain

    def check_states(self) -> None:
        plain, compiled = self.drafters
        assert plain.rates.counts.tobytes() == compiled.rates.counts.tobytes()
        assert plain._texts.keys() == compiled._texts.keys()
        for seq_id, text in plain._texts.items():
            assert state_of_text(text) == state_of_text(compiled._texts[seq_id])
        for salt in SALTS:
            assert table_state(plain.table, salt) == table_state(compiled.table, salt)
            past = [drafter.past_answers.of(salt) for drafter in self.drafters]
            assert (past[0] is None) == (past[1] is None)
            if past[0] is not None and past[1] is not None:
                assert state_of(past[0]) == state_of(past[1])


tokens = st.lists(st.integers(0, 4), min_size=1, max_size=40)
operations = st.one_of(
    st.tuples(st.just("start"), tokens, st.sampled_from(SALTS)),
    st.tuples(st.just("stop")),
    st.tuples(
        st.just("commit"),
        st.lists(st.integers(0, 4), min_size=1, max_size=6),
        st.lists(st.floats(-30, 30, width=32), min_size=8, max_size=8),
    ),
    st.tuples(st.just("propose"), st.integers(0, 20), st.integers(0, 12)),
    st.tuples(
        st.just("join"),
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True),
                st.floats(0.0, 8.0) | st.just(math.nan),
            ),
            max_size=10,
        ),
        st.integers(0, 20),
    ),
)


@every_level
@settings(deadline=None, max_examples=120)
@given(calls=st.lists(operations, min_size=1, max_size=25), pool_bytes=st.sampled_from([0, 1 << 14, 1 << 20]))
def test_drafts_and_states_are_equal_whatever_is_called(kernels, calls, pool_bytes):
    pair = Pair(kernels, vocab_size=32, pool_bytes=pool_bytes)
    for name, *arguments in calls:
        getattr(pair, name)(*arguments)
    pair.propose(8, 8)
    pair.check_states()


@every_level
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_drafts_and_states_are_equal_along_texts_that_fill_the_ring_of_past_answers(kernels, seed):
    source = np.random.default_rng(seed)
    pair = Pair(kernels, vocab_size=64, pool_bytes=1 << 14)
    phrases = [source.integers(0, 64, source.integers(3, 20)).tolist() for _ in range(12)]
    drafted = 0
    for _ in range(12):
        for _ in range(3):
            pair.start(phrases[source.integers(12)], SALTS[source.integers(2)])
        for _ in range(12):
            pair.commit(phrases[source.integers(12)], source.normal(0, 4, 8).tolist())
            drafted += sum(map(len, pair.propose(16, 12)))
            chain = phrases[source.integers(12)][:8]
            margins = [float("nan"), *source.uniform(0.0, 6.0, 7)]
            levels = [[token, (token + 1) % 64, (token + 5) % 64] for token in chain]
            pair.join(list(zip(levels, margins, strict=False)), 16)
        pair.check_states()
        for _ in range(3):
            pair.stop()
    pair.check_states()
    assert drafted > 1000


@every_level
@pytest.mark.parametrize("seed", range(3))
def test_drafts_and_states_are_equal_along_edited_copies(kernels, seed):
    source = np.random.default_rng(seed)
    pair = Pair(kernels, vocab_size=4096, pool_bytes=0)
    text = source.integers(0, 4000, 300).tolist()
    pair.start(text, None)
    at, resumed = 0, 0
    while at < len(text) - 20:
        length = int(source.integers(3, 16))
        pair.commit(text[at : at + length], [0.0] * 8)
        at += length + int(source.integers(0, 3))
        pair.commit(source.integers(4000, 4096, source.integers(0, 14)).tolist(), [0.0] * 8)
        resumed += pair.drafters[0]._texts[pair.running[0].seq_id].struct.lost_place > 0
        pair.propose(16, 12)
        pair.check_states()
    assert resumed > 5


@every_level
@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, of what is tested
@pytest.mark.parametrize("num_candidates", [1, 8])
def test_a_table_learns_the_same_also_where_logits_are_no_numbers(kernels, num_candidates):
    source = np.random.default_rng(0)
    tables = [
        RecycleTable(vocab_size=500, max_bytes=1 << 20, num_candidates=num_candidates, to_store=to_store)
        for to_store in (PlainRows, NativeLookup(kernels).to_store)
    ]
    for step in range(40):
        logits = -np.sort(-source.normal(0, 6, (50, 10)).astype(np.float32))
        logits[step % 50, 3:] = (np.nan, -np.inf, -1e30)[step % 3]
        logits[(step + 1) % 50] = -np.inf
        rows = VerifiedRows(
            token_ids=source.integers(0, 500, 50),
            previous_ids=source.integers(-1, 500, 50),
            candidate_ids=source.integers(0, 500, (50, 10)).astype(np.int32),
            candidate_logits=logits,
            salts=[(0, 20, None), (20, 50, "a")],
        )
        for table in tables:
            table.learn(rows)
    for salt in SALTS:
        assert table_state(tables[0], salt) == table_state(tables[1], salt) is not None


@every_level
def test_ids_at_the_border_of_a_huge_vocabulary_are_hashed_alike(kernels):
    pair = Pair(kernels, vocab_size=2**31, pool_bytes=1 << 20)
    last = 2**31 - 1
    pair.start([last, 0, last - 1, last, 0, last - 1, last, 0], None)
    (draft,) = pair.propose(8, 8)
    assert draft.token_ids[:3] == (last - 1, last, 0)
    pair.check_states()


@every_level
def test_a_text_without_room_for_its_tokens_is_refused(kernels):
    lookup, text = NativeLookup(kernels), LiveText(sequence([1, 2, 3]))
    with pytest.raises(ValueError, match="no room for its new tokens"):
        lookup.take([text], [[1] * text.index.capacity], HitRates())


@every_level
def test_more_nodes_than_there_is_room_for_are_refused(kernels):
    lookup, text = NativeLookup(kernels), LiveText(sequence([1, 2, 3]))
    with pytest.raises(ValueError, match="room"):
        lookup.grow([text, text], [DraftLimits(4, 4, 0.1), DraftLimits(-1, 4, 0.1)], HitRates())


@every_level
def test_an_index_that_is_none_is_refused(kernels):
    index = TextIndex((3, 1), capacity=64)
    index.struct.mask = 70
    with pytest.raises(ValueError, match="not a power of two"):
        NativeLookup(kernels).extend(index, [1, BREAK])
