"""JSON part by part is the JSON."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forerun.server import json_parts
from forerun.server.json_parts import ENTRIES_AT_ONCE, to_json, to_json_in_parts

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda values: st.lists(values) | st.dictionaries(st.text(), values), max_leaves=20)


@given(VALUES)
def test_the_parts_join_to_what_is_written_at_once(value):
    assert to_json_in_parts(value) == to_json(value)


def test_lists_are_written_in_stretches(monkeypatch):
    written = []
    monkeypatch.setattr(json_parts, "to_json", lambda value: written.append(value) or to_json(value))
    value = {"choices": [{"logprobs": {"tokens": list(range(2 * ENTRIES_AT_ONCE + 1)), "tops": []}}]}
    assert to_json_in_parts(value) == to_json(value)
    assert [len(part) for part in written if isinstance(part, list)] == [ENTRIES_AT_ONCE, ENTRIES_AT_ONCE, 1, 0]
