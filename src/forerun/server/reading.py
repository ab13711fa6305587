"""How one request's answers are read: their reasoning apart, then text and calls; and what they must match, if anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.core.sampling_params import SamplingParams
from forerun.core.structured_outputs import StructuredOutputs
from forerun.grammar import structural_tags
from forerun.models.chat.events import AnswerEvent, AnswerReader, Arguments, CallBegin, Content, Reasoning, TextReader
from forerun.models.chat.reasoning import Place, ReasonedReader, ReasoningForm
from forerun.models.chat.tool_format import json_format, one_of, regex, row
from forerun.models.tokenizer import Tokenizer
from forerun.server.errors import ApiError
from forerun.server.protocol import ChatBody
from forerun.server.tool_use import ToolUse


@dataclass(slots=True, kw_only=True)
class Reading:
    """How the answers to one request are read.

    Args:
        tokenizer: of the model.
        reasoning: how the model writes reasoning; None where none is taken apart.
        tools: which tools may be called, if any.
        may_think: whether there may be reasoning where the prompt does not open it.
        shows_reasoning: whether clients want to see it.
    """

    tokenizer: Tokenizer
    reasoning: ReasoningForm | None
    tools: ToolUse | None
    may_think: bool
    shows_reasoning: bool
    place: Place = field(init=False, default=Place.START)

    def begin_after(self, prompt: str, body: ChatBody) -> None:
        """Note where the answers begin, before there are any; `prompt` is the conversation as it is laid out."""
        if self.reasoning is not None:
            last, is_continued = body.messages[-1], bool(body.continue_final_message)
            self.place = self.reasoning.place_after(prompt, last_message=last.text, is_continued=is_continued)

    def sampled(self, sampling: SamplingParams) -> SamplingParams:
        """The same with what answers must match put behind their reasoning.

        Raises:
            ApiError: 400, a grammar of the client's own, which cannot be put there.
        """
        wanted, reasoning = sampling.constraint, self.reasoning
        if wanted is None or reasoning is None:
            return sampling
        form_of_calls: object = None if self.tools is None else self.tools.form
        frame = reasoning.frame(self.place, may_call=form_of_calls is reasoning)
        before = [*reasoning.before(self.place, may_think=self.may_think), *frame]
        if wanted.kind == "grammar" and (frame or self.place.is_reasoning):
            raise ApiError(
                400,
                "structured_outputs.grammar: the answer stands behind reasoning, where a grammar cannot be put; "
                "give json, regex, choice or structural_tag, or turn reasoning off in chat_template_kwargs",
                param="structured_outputs",
            )
        if wanted.kind == "grammar" or not before:
            return sampling
        form = row(*before, _tag_format(wanted))
        return replace(sampling, structured_outputs={"structural_tag": {"type": "structural_tag", "format": form}})

    def writer(self) -> AnswerWriter:
        """Writes one completion; to be called when it begins."""
        return AnswerWriter(self)


def _tag_format(wanted: StructuredOutputs) -> Any:
    """What a text must match, but for a grammar, as the format of a structural tag."""
    match wanted.kind:
        case "regex":
            return regex(wanted.text)
        case "choice":  # by regexes, which take in no special token, as literal texts do
            return one_of(*(regex(_escaped(one)) for one in json.loads(wanted.text)))
        case "structural_tag":
            return structural_tags.format_of(json.loads(wanted.text))
        case _:
            schema = json.loads(wanted.text)
            spaces: dict[str, Any] = {"whitespace_flexible": not wanted.disable_any_whitespace}
            if wanted.whitespace_pattern is not None:
                spaces["whitespace_pattern"] = wanted.whitespace_pattern
            own = schema.get("x-guidance") or {}
            return json_format(schema | {"x-guidance": spaces | own if isinstance(own, dict) else own})


def _escaped(text: str) -> str:
    """The regex of one text."""
    return "".join(one if one.isalnum() else f"\\x{{{ord(one):x}}}" for one in text)


class AnswerWriter:
    """Takes a completion's text apart as it grows, and makes deltas of it, each call at most once in each.

    Reasoning that clients do not want is left out, and content where answers must consist of calls: what is none is
    the beginning of one that was cut.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._tools = tools = reading.tools
        self._reader: AnswerReader = TextReader() if tools is None else tools.reader()
        self._reasoning: ReasonedReader | None = None
        if reading.reasoning is not None:
            self._reader = self._reasoning = reading.reasoning.around(self._reader, reading.place)
        is_plain = tools is None and reading.reasoning is None
        self._empty_delta = {"content": ""} if is_plain else {}
        self.opening = {"role": "assistant", "content": "" if is_plain else None}
        """What the first delta of a stream says before anything else."""
        self._has_text = tools is None or not tools.is_forced
        hidden = {Reasoning: not reading.shows_reasoning, Content: not self._has_text}
        self._hidden = tuple(kind for kind, is_hidden in hidden.items() if is_hidden)
        self._num_calls = 0

    def events(self, text: str, *, finished: bool) -> list[AnswerEvent]:
        """Reasoning, text and calls in the order in which they stand."""
        events = self._reader.push(text, finished=finished)
        self._num_calls += sum(isinstance(event, CallBegin) for event in events)
        return [event for event in events if not isinstance(event, self._hidden)]

    def delta(self, text: str, *, finished: bool) -> dict[str, Any]:
        """`reasoning_content`, `content` and `tool_calls`, each if there is any; content in any case where there is nothing else."""
        texts, calls, last = dict(self._empty_delta), dict[int, dict[str, Any]](), self._num_calls - 1
        for event in self.events(text, finished=finished):
            match event:
                case Reasoning(more):
                    texts["reasoning_content"] = texts.get("reasoning_content", "") + more
                case Content(more):
                    texts["content"] = texts.get("content", "") + more
                case CallBegin(name):
                    last += 1
                    head = {"index": last, "id": self.new_id(), "type": "function"}
                    calls[last] = {**head, "function": {"name": name, "arguments": ""}}
                case Arguments(more):
                    call = calls.setdefault(last, {"index": last, "function": {"arguments": ""}})
                    call["function"]["arguments"] += more
        return texts | ({"tool_calls": list(calls.values())} if calls else {})

    def message(self, text: str) -> dict[str, Any]:
        """The assistant's whole message."""
        delta = self.delta(text, finished=True)
        for call in delta.get("tool_calls", ()):
            del call["index"]
        nothing = "" if self._has_text and "tool_calls" not in delta else None
        return {"role": "assistant", "content": nothing, "refusal": None, **delta}

    def new_id(self) -> str:
        """An id for a call."""
        assert self._tools is not None
        return self._tools.form.new_id()

    @property
    def is_calling(self) -> bool:
        """Whether a call has begun and is not whole; after the end, that it was cut."""
        return self._reader.is_calling

    @property
    def has_called(self) -> bool:
        """Whether there are calls, all of them whole."""
        return self._num_calls > 0 and not self.is_calling

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's reason for the engine's: "stop" where the request names the function."""
        is_named = self._tools is not None and self._tools.is_named
        return "tool_calls" if reason == "stop" and self.has_called and not is_named else reason

    def num_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """How many tokens of the completion so far are reasoning, the mark at its end included."""
        reading = self._reading
        if reading.reasoning is None or self._reasoning is None or not self._reasoning.has_reasoned:
            return 0
        return reading.reasoning.num_tokens(
            token_ids, reading.tokenizer, place=reading.place, is_cut=self._reasoning.is_reasoning
        )
