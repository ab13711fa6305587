"""The index finds the occurrences that are there, and forgets what is dropped."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forerun.drafters.suffix_tree import BREAK, GRAM_SIZES, SuffixIndex
from tests.drafters.naive_suffix import followers

tokens = st.integers(0, 2)


class TextsComeAndGo(RuleBasedStateMachine):
    """Against a list of texts: the tokens that follow every gram, latest first."""

    def __init__(self) -> None:
        super().__init__()
        self.index = SuffixIndex(vocab_size=3)
        self.ended: list[list[int]] = []
        self.growing: list[int] = []

    @rule(token_ids=st.lists(tokens, max_size=9))
    def extend(self, token_ids):
        self.index.extend(token_ids)
        self.growing.extend(token_ids)

    @rule()
    def end_text(self):
        self.index.end_text()
        self.ended.append(self.growing)
        self.growing = []

    @precondition(lambda self: self.ended)
    @rule()
    def drop_oldest_text(self):
        self.index.drop_oldest_text()
        self.ended.pop(0)

    @rule(gram=st.sampled_from(GRAM_SIZES).flatmap(lambda size: st.lists(tokens, min_size=size, max_size=size)))
    def look_up(self, gram):
        found = [self.index.tokens[place] for place in self.index.places(gram, limit=1000)]
        assert found == followers([*self.ended, self.growing], tuple(gram))

    @invariant()
    def lengths_agree(self):
        assert self.index.num_ended_texts == len(self.ended)
        assert self.index.text_length == len(self.growing)
        assert len(self.index) == 1 + sum(len(text) + 1 for text in self.ended) + len(self.growing)

    @invariant()
    def ended_texts_are_those_that_were_not_dropped(self):
        assert self.index.ended_texts().tolist() == [token for text in self.ended for token in (*text, BREAK)]


TextsComeAndGo.TestCase.settings = settings(deadline=None, max_examples=100)
test_index_agrees_with_a_list_of_texts = TextsComeAndGo.TestCase


@settings(deadline=None)
@given(text=st.lists(tokens, min_size=5, max_size=40), limit=st.integers(0, 5))
def test_limit_keeps_the_latest_places(text, limit):
    index = SuffixIndex(vocab_size=3)
    index.extend(text)
    gram = text[-1:]
    assert index.places(gram, limit=limit) == index.places(gram, limit=1000)[:limit]


def test_a_long_run_of_texts_keeps_only_the_window_in_memory():
    index = SuffixIndex(vocab_size=100)
    for first in range(200):
        index.extend([(first + i) % 97 for i in range(50)])
        index.end_text()
        if first >= 2:
            index.drop_oldest_text()
    assert len(index.tokens) < 5 * 51


def test_a_text_takes_no_more_memory_than_was_promised_before_it_was_added():
    for num_tokens in range(600, 3000, 40):
        index = SuffixIndex(vocab_size=50_000)
        most = index.most_bytes_with(num_tokens)
        index.extend(range(num_tokens))
        index.end_text()
        assert index.num_bytes <= most, num_tokens
