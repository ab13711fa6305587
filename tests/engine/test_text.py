"""Stop strings and streaming text."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.text import CompletionText


class Pieces:
    """A tokenizer whose token i stands for the i-th piece of text."""

    def __init__(self, pieces):
        self._pieces = pieces

    def push(self, token_id):
        return self._pieces[token_id]


def stream(pieces, stop, *, include_stop=False):
    """All deltas of a text made of `pieces`, its final text, and the stop string that ended it."""
    text = CompletionText(Pieces(pieces), stop=stop, include_stop=include_stop)
    deltas = []
    for token_id in range(len(pieces)):
        found = text.push(token_id)
        deltas.append(text.take_delta(finished=found is not None or token_id == len(pieces) - 1))
        if found is not None:
            return deltas, text.text, found
    return deltas, text.text, None


def test_stop_string_across_token_borders_is_never_shown():
    deltas, text, stop = stream(["ab", "cE", "N", "Dxy"], ("END",))
    assert stop == "END"
    assert text == "abc"
    assert deltas == ["ab", "c", "", ""]


def test_what_only_looked_like_a_stop_string_is_shown_once_decided():
    deltas, text, stop = stream(["aE", "N", "x"], ("END",))
    assert stop is None
    assert deltas == ["a", "", "ENx"]
    assert text == "aENx"


def test_included_stop_string_ends_the_text():
    _, text, stop = stream(["abE", "NDx"], ("END",), include_stop=True)
    assert (text, stop) == ("abEND", "END")


def test_earliest_stop_string_wins():
    _, text, stop = stream(["a<b>c"], ("c", "<b>"))
    assert (text, stop) == ("a", "<b>")


def test_stop_strings_do_not_count_before_min_tokens():
    text = CompletionText(Pieces(["x.", "y."]), stop=(".",))
    assert text.push(0, stops_count=False) is None
    assert text.push(1) == "."
    assert text.text == "x.y"


alphabet = st.text(alphabet="ab.", max_size=3)


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(alphabet, min_size=1, max_size=12),
    stop=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
)
def test_deltas_concatenate_to_the_text_before_the_first_stop(pieces, stop):
    deltas, text, found = stream(pieces, tuple(stop))
    assert "".join(deltas) == text
    whole = "".join(pieces)
    ends = [whole.find(s) for s in stop if s in whole]
    if found is None:
        assert not ends
        assert text == whole
    else:
        assert whole.startswith(text + found)
        assert all(s not in text for s in stop)


def test_a_stop_string_inside_the_text_before_min_tokens_is_not_found_later():
    text = CompletionText(Pieces(["x.", "y"]), stop=(".", "a longer one"))
    assert text.push(0, stops_count=False) is None
    assert text.push(1) is None
    assert text.text == "x.y"


@settings(deadline=None, max_examples=500)
@given(
    pieces=st.lists(st.text("ab.", max_size=6), min_size=1, max_size=12),
    stop=st.lists(st.text("ab.", min_size=1, max_size=7), min_size=1, max_size=3),
)
def test_what_is_held_back_is_the_longest_end_that_begins_a_stop_string(pieces, stop):
    text = CompletionText(Pieces(pieces), stop=tuple(stop))
    shown = ""
    for token_id in range(len(pieces)):
        text.push(token_id, stops_count=False)
        whole = text.text
        ends = (at for at in range(len(whole)) if any(s != whole[at:] and s.startswith(whole[at:]) for s in stop))
        shown += text.take_delta(finished=False)
        assert shown == whole[: next(ends, len(whole))]


def test_the_longest_stop_strings_that_a_request_may_have_cost_little_per_token():
    """Their worst text is the one that nearly ends each of them all the time."""
    stop = tuple("a" * 1000 + chr(ord("A") + place) * 24 for place in range(16))
    num_tokens = 1000
    text = CompletionText(Pieces(["aaaac"[: 4 + token_id % 2] for token_id in range(num_tokens)]), stop=stop)
    begin = time.process_time()
    for token_id in range(num_tokens):
        assert text.push(token_id) is None
        text.take_delta(finished=False)
    assert time.process_time() - begin < 1.0  # 3 s where all ends are compared with all strings
