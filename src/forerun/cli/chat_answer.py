"""Answers in conversations, shown as they arrive: what a model thinks apart from what it says."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forerun.core.outputs import StreamDelta
from forerun.models.chat.conversation import lay_out
from forerun.models.chat.events import AnswerReader, Content, Reasoning, TextReader
from forerun.models.chat.formats import reasoning_form

if TYPE_CHECKING:
    from forerun import LLM, SamplingParams

DIM, NORMAL = "\x1b[2m", "\x1b[22m"
BEHIND_REASONING = "\n\n"


class ChatAnswer:
    """One answer: its content goes to standard output, its reasoning to standard error, dim where that is a terminal.

    Args:
        reader: takes the answer's text apart.
        is_shown: whether anything is written.
    """

    def __init__(self, reader: AnswerReader, *, is_shown: bool = True) -> None:
        self.reasoning = self.content = ""
        self._reader = reader
        self._is_shown = is_shown
        self._is_over = False

    def add(self, delta: StreamDelta) -> None:
        """Show what is certain now."""
        self._read(delta.text, finished=delta.finish_reason is not None)

    def end(self) -> None:
        """Show what is left of an answer that was stopped."""
        self._read("", finished=True)

    @property
    def message(self) -> dict[str, Any] | None:
        """The answer as a message of the conversation; None if there is nothing of it."""
        if not (self.content or self.reasoning):
            return None
        reasoning = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.content, **reasoning}

    def show(self) -> None:
        """Write an answer that was not shown as it arrived."""
        _write_reasoning(self.reasoning)
        self._write_content(self.content)

    def _read(self, text: str, *, finished: bool) -> None:
        if self._is_over:
            return
        self._is_over = finished
        for event in self._reader.push(text, finished=finished):
            match event:
                case Reasoning(more):
                    if self._is_shown:
                        _write_reasoning(more)
                    self.reasoning += more
                case Content(more):
                    if self._is_shown:
                        self._write_content(more, is_first=not self.content)
                    self.content += more

    def _write_content(self, text: str, *, is_first: bool = True) -> None:
        if self.reasoning and is_first:
            _write_reasoning(BEHIND_REASONING)
        sys.stdout.write(text)
        sys.stdout.flush()


def _write_reasoning(text: str) -> None:
    is_dim = sys.stderr.isatty() and bool(text)
    sys.stderr.write(f"{DIM}{text}{NORMAL}" if is_dim else text)
    sys.stderr.flush()


def ask(
    llm: LLM, messages: Sequence[Mapping[str, Any]], params: SamplingParams, *, is_shown: bool = True
) -> tuple[Generator[StreamDelta, None, None], ChatAnswer]:
    """The stream of the answer to a conversation, and what shows it.

    Raises:
        RequestError: the conversation cannot be laid out, or does not fit.
    """
    tokenizer = llm.get_tokenizer()
    form = reasoning_form(tokenizer)
    if form is None:
        return llm.stream_chat(messages, params), ChatAnswer(TextReader(), is_shown=is_shown)
    if any(map(tokenizer.is_special, form.marks)):
        params = replace(params, skip_special_tokens=False)
    prompt = lay_out(tokenizer, messages, add_generation_prompt=True)
    place = form.place_after(prompt, last_message=messages[-1]["content"], is_continued=False)
    answer = ChatAnswer(form.around(TextReader(), place), is_shown=is_shown)
    return llm.stream_chat(messages, params), answer
