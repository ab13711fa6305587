"""JSON of answers, the long ones part by part: while Python makes JSON of one value, no other thread runs."""

from __future__ import annotations

import json
from typing import Any

ENTRIES_AT_ONCE = 256  # of a list; each may be a token with its twenty likeliest

to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""Writes JSON as `json.dumps` does, which makes an encoder each time."""


def to_json_in_parts(value: Any) -> str:
    """What `to_json` writes of values whose keys are strings: objects key by key, lists in stretches or, of one entry, that."""
    match value:
        case dict():
            return f"{{{','.join(f'{to_json(key)}:{to_json_in_parts(entry)}' for key, entry in value.items())}}}"
        case [only]:
            return f"[{to_json_in_parts(only)}]"
        case list() if len(value) > ENTRIES_AT_ONCE:
            stretches = (value[begin : begin + ENTRIES_AT_ONCE] for begin in range(0, len(value), ENTRIES_AT_ONCE))
            return f"[{','.join(to_json(stretch)[1:-1] for stretch in stretches)}]"
        case _:
            return to_json(value)
