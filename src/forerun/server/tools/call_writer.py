"""One completion's text and calls in OpenAI's form."""

from __future__ import annotations

from typing import Any

from forerun.server.tools.base import Arguments, CallBegin, CallReader, Content, ToolFormat


class CallWriter:
    """Makes deltas of a completion's text as it grows, each call at most once in each.

    Args:
        reader: finds the calls.
        form: gives them ids.
        is_named: the request names the function; OpenAI's `finish_reason` is "stop" then.
    """

    def __init__(self, reader: CallReader, form: ToolFormat, *, is_named: bool) -> None:
        self._reader = reader
        self._form = form
        self._is_named = is_named
        self._num_calls = 0

    def delta(self, text: str, *, finished: bool) -> dict[str, Any]:
        """`content` and `tool_calls`, each if there is any."""
        content, calls = "", dict[int, dict[str, Any]]()
        for event in self._reader.push(text, finished=finished):
            match event:
                case Content(more):
                    content += more
                case CallBegin(name):
                    head = {"index": self._num_calls, "id": self._form.new_id(), "type": "function"}
                    calls[self._num_calls] = {**head, "function": {"name": name, "arguments": ""}}
                    self._num_calls += 1
                case Arguments(more):
                    last = self._num_calls - 1
                    call = calls.setdefault(last, {"index": last, "function": {"arguments": ""}})
                    call["function"]["arguments"] += more
        return ({"content": content} if content else {}) | ({"tool_calls": list(calls.values())} if calls else {})

    def message(self, text: str) -> dict[str, Any]:
        """The assistant's whole message."""
        delta = self.delta(text, finished=True)
        message = {"role": "assistant", "content": delta.get("content"), "refusal": None}
        calls = delta.get("tool_calls")
        if not calls:
            return message | {"content": delta.get("content", "")}
        for call in calls:
            del call["index"]
        return message | {"tool_calls": calls}

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's reason for the engine's."""
        calls_end_it = self._num_calls > 0 and not self._is_named and not self._reader.is_calling
        return "tool_calls" if reason == "stop" and calls_end_it else reason
