"""The items of a response, and the events of a stream that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from forerun.models.chat.events import AnswerEvent, Arguments, CallBegin, Reasoning
from forerun.models.chat.events import Content as Text

Status = Literal["completed", "incomplete"]


class Output:
    """Makes items of an answer that is taken apart: each stretch of reasoning is an item, each stretch of text
    a message, each call an item.

    Args:
        new_call_id: returns an id for a call.
        spaces: namespace and name of a function, by the name by which the model knows it; of those that have a namespace.
    """

    def __init__(self, new_call_id: Callable[[], str], spaces: Mapping[str, tuple[str, str]]) -> None:
        self.items: list[dict[str, Any]] = []  # those that have ended
        self._new_call_id = new_call_id
        self._spaces = spaces
        self._open: dict[str, Any] | None = None  # as it began
        self._pieces: list[str] = []  # of its text or arguments
        self._logprobs: list[dict[str, Any]] = []

    def push(
        self, parts: Iterable[AnswerEvent], *, logprobs: Sequence[dict[str, Any]] = (), is_calling: bool = False
    ) -> list[dict[str, Any]]:
        """The events of what comes next.

        Args:
            parts: more of the answer.
            logprobs: of the tokens of the parts; the first text among them has all.
            is_calling: whether the last call goes on.
        """
        events: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case Text(text):
                    if not self._is_open("message"):
                        events += self._begin_message()
                    self._logprobs += logprobs
                    events.append(self._of_part("output_text.delta", delta=self._more(text), logprobs=list(logprobs)))
                    logprobs = ()
                case Reasoning(text):
                    if not self._is_open("reasoning"):
                        events += self._begin_reasoning()
                    events.append(self._of_part("reasoning_text.delta", delta=self._more(text)))
                case CallBegin(name):
                    events += self._begin_call(name)
                case Arguments(more):
                    events.append(self._of_item("function_call_arguments.delta", delta=self._more(more)))
        if self._is_open("function_call") and not is_calling:
            events += self.close("completed")
        return events

    def close(self, status: Status) -> list[dict[str, Any]]:
        """The end of the item that is open, if one is."""
        if self._open is None:
            return []
        text, item = "".join(self._pieces), {**self._open, "status": status}
        match item["type"]:
            case "message":
                part = self._text_part(text)
                item["content"] = [part]
                ended = self._of_part("output_text.done", text=text, logprobs=part["logprobs"])
                events = [ended, self._of_part("content_part.done", part=part)]
            case "reasoning":
                part = _reasoning_part(text)
                item["content"] = [part]
                events = [
                    self._of_part("reasoning_text.done", text=text),
                    self._of_part("content_part.done", part=part),
                ]
            case _:
                item["arguments"] = text
                events = [self._of_item("function_call_arguments.done", name=item["name"], arguments=text)]
        events.append(self._event("output_item.done", item=item))
        self.items.append(item)
        self._open, self._pieces, self._logprobs = None, [], []
        return events

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _begin_message(self) -> list[dict[str, Any]]:
        begun = self._begin({"type": "message", "id": _new_id("msg"), "role": "assistant", "content": []})
        return [*begun, self._of_part("content_part.added", part=self._text_part(""))]

    def _begin_reasoning(self) -> list[dict[str, Any]]:
        begun = self._begin({"type": "reasoning", "id": _new_id("rs"), "summary": [], "content": []})
        return [*begun, self._of_part("content_part.added", part=_reasoning_part(""))]

    def _begin_call(self, name: str) -> list[dict[str, Any]]:
        space, own_name = self._spaces.get(name, (None, name))
        named = {"name": own_name} if space is None else {"name": own_name, "namespace": space}
        ids = {"id": _new_id("fc"), "call_id": self._new_call_id()}
        return self._begin({"type": "function_call", **ids, **named, "arguments": ""})

    def _begin(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        end = self.close("completed")
        self._open = item
        return [*end, self._event("output_item.added", item={**item, "status": "in_progress"})]

    def _more(self, text: str) -> str:
        self._pieces.append(text)
        return text

    def _text_part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _of_part(self, kind: str, **more: Any) -> dict[str, Any]:
        """Of the only part of a message or of reasoning."""
        return self._of_item(kind, content_index=0, **more)

    def _of_item(self, kind: str, **more: Any) -> dict[str, Any]:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "output_index": len(self.items), **more}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
