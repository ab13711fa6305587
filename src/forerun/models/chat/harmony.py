"""Harmony, the form of gpt-oss: answers are messages on channels, which say what is reasoning, what is text and what is a call.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`; a call is the message
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`, or has its recipient before the channel.
The prompt ends with `<|start|>assistant`. All marks are special tokens, and the last one of an answer ends it unseen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from itertools import takewhile
from typing import Any

from forerun.models.chat.events import (
    AnswerEvent,
    AnswerReader,
    Arguments,
    CallBegin,
    Reasoning,
    TextReader,
)
from forerun.models.chat.reasoning import Place, ReasonedReader, ReasoningForm
from forerun.models.chat.tool_format import (
    Function,
    ToolFormat,
    const,
    json_format,
    one_of,
    regex,
    row,
    styled,
)
from forerun.models.tokenizer import Tokenizer

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
NEXT = f"{END}{START}assistant"
ANALYSIS, FINAL, PREAMBLE = (f"{CHANNEL}{name}{MESSAGE}" for name in ("analysis", "final", "commentary"))

ENDS = (END, "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
ANY_MARK = re.compile("|".join(map(re.escape, MARKS)))
LONGEST_MARK = max(map(len, MARKS))
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*([a-z]+)")
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
CUT_HEADER = re.compile(r"(assistant)? ?(to=\S*)? ?(<\|channel\|> ?[a-z]* ?(to=[^ <]*)? ?(<\|constrain\|>)? ?(json)?)?")
"""A header whose message does not follow, which is nothing to show; with one space for any white space."""
ROLES = ("assistant", "to=")
"""What a header may begin with, before its channel."""

MOST_HEADER = 512  # characters; what is longer is no header
BETWEEN_MESSAGES = "\n\n"

BODY = regex(r"(.|\n)*")
"""The format of any text without special tokens, which would begin another message."""


class Kind(Enum):
    """What a message is."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class Part(Enum):
    """What of a message is read."""

    HEADER = auto()
    BODY = auto()
    NONE = auto()


class HarmonyReader:
    """Reads the messages of an answer as its text grows.

    What is no message goes on as content, as the model wrote it, and so does a call that is not whole, or of no known
    function. Messages of one kind in a row have an empty line between them.

    Args:
        names: functions that there are.
        is_forced: a grammar completes each call that has begun, so it is reported at once.
        place: where the answer begins.
        then: reads content.
    """

    def __init__(
        self,
        names: frozenset[str],
        *,
        is_forced: bool,
        place: Place = Place.START,
        then: AnswerReader | None = None,
    ) -> None:
        self.has_reasoned = place.is_reasoning
        self.names, self.is_forced = names, is_forced
        self._then = then or TextReader()
        self._rest = ""  # what may become a mark
        self._part = {Place.START: Part.HEADER, Place.CLOSED: Part.NONE}.get(place, Part.BODY)
        self._kind = Kind.REASONING if place.is_reasoning else Kind.CONTENT
        self._name = ""  # of the function that is called
        self._header = self._body = ""  # a body is kept of calls alone
        self._last_told: Kind | None = None
        self._is_first_told = True  # of its message
        self._is_cut = False
        self._events: list[AnswerEvent] = []

    @property
    def is_reasoning(self) -> bool:
        """Whether a message of reasoning has begun and not ended."""
        return self._part == Part.BODY and self._kind == Kind.REASONING

    @property
    def is_calling(self) -> bool:
        """Whether a call has begun that is not whole; after the end, that it was cut."""
        is_begun = self.is_forced and self._part == Part.BODY and self._kind == Kind.CALL
        return self._is_cut or is_begun or self._then.is_calling

    def push(self, text: str, *, finished: bool = False) -> list[AnswerEvent]:
        """Take more text; return what is certain now, at its end all that is left."""
        text, at = self._rest + text, 0
        for found in ANY_MARK.finditer(text):
            self._take(text[at : found.start()])
            self._take_mark(found.group())
            at = found.end()
        rest = text[at:]
        most = 0 if finished else min(len(rest), LONGEST_MARK)
        begun = next((n for n in range(most, 0, -1) if _begins_mark(rest[-n:])), 0)
        self._take(rest[: len(rest) - begun])
        self._rest = rest[len(rest) - begun :]
        if finished:
            self._finish()
        events, self._events = self._events, []
        return events

    def _take(self, text: str) -> None:
        """Take text that is no mark."""
        if not text:
            return
        match self._part:
            case Part.HEADER:
                self._header += text
                if not self._may_be_header:
                    self._give_back()
            case Part.NONE:
                if text.strip():
                    self._begin(Kind.CONTENT)
                    self._take(text.lstrip())
            case Part.BODY if self._kind == Kind.CALL:
                self._body += text
                if self.is_forced:
                    self._events.append(Arguments(text))
            case Part.BODY:
                self._tell(text)

    def _take_mark(self, mark: str) -> None:
        if mark == MESSAGE and self._part == Part.HEADER:
            self._begin_message()
        elif mark == MESSAGE and self._part == Part.NONE:
            self._begin(Kind.CONTENT)
        elif mark == CHANNEL and self._part != Part.HEADER:
            self._end()
            self._part, self._header = Part.HEADER, mark
        elif mark in (CHANNEL, "<|constrain|>") and self._part == Part.HEADER:
            self._header += mark
        elif mark == START:
            self._end()
            self._part, self._header = Part.HEADER, ""
        elif mark in (MESSAGE, "<|constrain|>"):
            self._take(mark)
        else:
            self._end()

    @property
    def _may_be_header(self) -> bool:
        before, mark, _ = self._header.partition(CHANNEL)
        role = before.strip()
        is_role = not role or any(role.startswith(one) or (not mark and one.startswith(role)) for one in ROLES)
        return is_role and len(self._header) <= MOST_HEADER

    def _begin_message(self) -> None:
        channel, recipient = CHANNEL_NAME.search(self._header), RECIPIENT.search(self._header)
        if recipient is not None and recipient[1] in self.names:
            self._name = recipient[1]
            self._begin(Kind.CALL)
            if self.is_forced:
                self._report_call()
        elif channel is not None and channel[1] == "analysis":
            self.has_reasoned = True
            self._begin(Kind.REASONING)
        elif recipient is None:
            self._begin(Kind.CONTENT)
        else:
            self._header += MESSAGE
            self._give_back()

    def _begin(self, kind: Kind) -> None:
        self._part, self._kind, self._body, self._is_first_told = Part.BODY, kind, "", True

    def _give_back(self) -> None:
        """It was no header: what was read of it is content, and so is what follows."""
        text = self._header if self._header.strip() else ""
        self._begin(Kind.CONTENT)
        self._tell(text)

    def _end(self) -> None:
        """A message ends, whole or not."""
        if self._part == Part.HEADER and not CUT_HEADER.fullmatch(" ".join(self._header.split())):
            self._give_back()
        elif self._part == Part.BODY and self._kind == Kind.CALL:
            self._end_call()
        self._part, self._header = Part.NONE, ""

    def _end_call(self) -> None:
        is_whole = _is_object(self._body)
        if self.is_forced:
            self._is_cut = not is_whole
        elif is_whole:
            self._report_call()
            self._events.append(Arguments(self._body.strip()))
        else:
            text = f"{self._header}{MESSAGE}{self._body}"
            self._begin(Kind.CONTENT)
            self._tell(text)

    def _report_call(self) -> None:
        self._events.append(CallBegin(self._name))
        self._last_told = Kind.CALL

    def _tell(self, text: str) -> None:
        """Report reasoning or content."""
        if not text:
            return
        if self._is_first_told and self._last_told == self._kind:
            text = BETWEEN_MESSAGES + text
        self._last_told, self._is_first_told = self._kind, False
        self._events += [Reasoning(text)] if self._kind == Kind.REASONING else self._then.push(text)

    def _finish(self) -> None:
        """The text is at its end, which is also that of a message."""
        was_reasoning = self.is_reasoning
        self._end()
        self._events += self._then.push("", finished=True)
        if was_reasoning:
            self._part = Part.BODY


class Harmony(ToolFormat, ReasoningForm):
    """The form, of calls and of reasoning."""

    mark = CHANNEL
    marks = MARKS

    def __str__(self) -> str:
        """In words."""
        return f"on the channel analysis, as {ANALYSIS} begins it"

    # --- calls

    def forced(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:  # noqa: ARG002
        """One call, which ends the answer; its recipient behind the channel or before it."""
        calls = []
        for function in functions:
            to = f"to=functions.{function.name}"
            heads = (
                f"{CHANNEL}commentary {to} <|constrain|>json{MESSAGE}",
                f" {to}{CHANNEL}commentary json{MESSAGE}",
            )
            calls.append(row(one_of(*map(const, heads)), json_format(styled(function))))
        return one_of(*calls)

    def after_text(self, functions: Sequence[Function], *, only_one: bool) -> dict[str, Any]:
        """One call, perhaps after what the model says to the user beforehand, or an answer."""
        before = one_of(row(const(PREAMBLE), BODY, const(NEXT)), const(""))
        return row(before, one_of(self.forced(functions, only_one=only_one), self.answer(BODY)))

    def answer(self, form: dict[str, Any]) -> dict[str, Any]:
        """A message on the final channel."""
        return row(const(FINAL), form)

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls, as messages."""
        head = f"{CHANNEL}commentary to=functions.{{}} <|constrain|>json{MESSAGE}{{}}"
        return NEXT.join(head.format(name, json.dumps(given, ensure_ascii=False)) for name, given in calls)

    def as_its_templates_take(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each call in a message of its own, and before its result; what was said before it among the reasoning.

        The templates take the first call of a message, and either reasoning or content beside it.
        """
        taken: list[dict[str, Any]] = []
        moved = set[int]()  # ids of results
        for at, message in enumerate(messages):
            if id(message) in moved:
                continue
            if not message.get("tool_calls"):
                taken.append(message)
                continue
            results = list(takewhile(lambda one: one["role"] == "tool", messages[at + 1 :]))
            for place, call in enumerate(message["tool_calls"]):
                of_it = [
                    one
                    for number, one in enumerate(results)
                    if one.get("tool_call_id", number) == call.get("id", place) and id(one) not in moved
                ]
                turn = _call_alone(call) if place else _thinking_alone(message) | {"tool_calls": [call]}
                taken += [turn, *of_it]
                moved.update(map(id, of_it))
        return taken

    # --- reasoning; the reader is that of both

    def place_after(self, prompt: str, *, last_message: str, is_continued: bool) -> Place:  # noqa: ARG002
        """By the last message in the prompt: its header is open, its body, or neither."""
        _, start, last = prompt.rpartition(START)
        header, is_open, body = last.partition(MESSAGE)
        if not start or not is_open:
            return Place.START
        if ANY_MARK.search(body):
            return Place.CLOSED
        return (Place.INSIDE if body else Place.OPENED) if f"{CHANNEL}analysis" in header else Place.BEHIND

    def reader(self, names: frozenset[str], *, is_forced: bool) -> HarmonyReader:
        """A reader of an answer from its start on."""
        return HarmonyReader(names, is_forced=is_forced)

    def around(self, then: AnswerReader, place: Place) -> ReasonedReader:
        """The same from a place on; where it does not read the calls, another does in the content."""
        if isinstance(then, HarmonyReader):
            return HarmonyReader(then.names, is_forced=then.is_forced, place=place)
        return HarmonyReader(frozenset(), is_forced=False, place=place, then=then)

    def before(self, place: Place, *, may_think: bool) -> list[dict[str, Any]]:
        """A message of reasoning, or nothing where none is open."""
        if place.is_reasoning:
            return [BODY, const(NEXT)]
        opening = [const(f"{START}assistant")] if place == Place.CLOSED else []
        thoughts = row(const(ANALYSIS), BODY, const(NEXT))
        return [*opening, one_of(thoughts, const(""))] if place != Place.BEHIND and may_think else opening

    def frame(self, place: Place, *, may_call: bool) -> list[dict[str, Any]]:
        """The header of the final message, unless the prompt has it; where there may be a call, the end of what is continued."""
        if place == Place.BEHIND:
            return [const(NEXT)] if may_call else []
        return [] if may_call else [const(FINAL)]

    def num_tokens(self, token_ids: Sequence[int], tokenizer: Tokenizer, *, place: Place, is_cut: bool) -> int:  # noqa: ARG002
        """The messages on the channel analysis, with their headers and ends."""
        marks = {tokenizer.id_of(mark): mark for mark in MARKS}
        count, begin, has_body = 0, 0, place not in (Place.START, Place.CLOSED)
        is_reasoning = place.is_reasoning
        for at, token_id in enumerate(token_ids):
            mark = marks.get(token_id)
            if mark == MESSAGE and not has_body:
                header = tokenizer.decode(token_ids[begin:at], skip_special_tokens=False)
                has_body, is_reasoning = True, f"{CHANNEL}analysis" in header
            elif mark in ENDS or mark == START or (mark == CHANNEL and has_body):
                end = at + 1 if mark in ENDS else at
                count += end - begin if is_reasoning else 0
                begin, has_body, is_reasoning = end, False, False
        return count + (len(token_ids) - begin if is_reasoning else 0)


def _call_alone(call: dict[str, Any]) -> dict[str, Any]:
    """A message that is a call and nothing else."""
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _thinking_alone(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its content behind its reasoning, where it has both."""
    from forerun.models.chat_template import REASONING_FIELDS  # here, as it imports jinja2

    name = next((name for name in REASONING_FIELDS if message.get(name)), None)
    if name is None or not message["content"]:
        return message
    return message | {name: f"{message[name]}{BETWEEN_MESSAGES}{message['content']}", "content": ""}


def _begins_mark(text: str) -> bool:
    return any(mark.startswith(text) for mark in MARKS)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


HARMONY = Harmony()
