"""Server-sent events from bytes cut anywhere."""

from __future__ import annotations

import pytest

from forerun.bench.load.sse import EventStream

STREAM = (
    b': ping\n\ndata: {"a": 1}\n\nevent: x\ndata:one\ndata: two\n\ndata: \xe2\x82\xac\r\n\r\nid: 3\n\ndata: [DONE]\n\n'
)
EVENTS = [b'{"a": 1}', b"one\ntwo", "€".encode(), b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_the_bytes_are_cut(size):
    events = EventStream()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [data for piece in pieces for data in events.feed(piece)] == EVENTS
    assert events.close() == []


def test_a_last_event_needs_no_blank_line():
    events = EventStream()
    assert events.feed(b"data: [DONE]") == []
    assert events.close() == [b"[DONE]"]
