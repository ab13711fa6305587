"""`forerun chat`: a conversation in the terminal."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING

from forerun.cli import loading
from forerun.cli.answer import Answer, read_answer
from forerun.cli.chat_answer import ChatAnswer, ask
from forerun.cli.command import command
from forerun.cli.options import EngineOptions, SamplingOptions
from forerun.cli.speculation_figures import speculation_rows
from forerun.errors import ForerunError, ModelError, WorkerError, did_you_mean

if TYPE_CHECKING:
    from forerun import LLM, SamplingParams

if importlib.util.find_spec("readline"):  # absent on Windows; its import gives `input` line editing and history
    import readline as readline

SAMPLING, ENGINE = SamplingOptions(), EngineOptions()

HELP = """/help   show this
/stats  how well drafting worked so far
/reset  forget the conversation
/exit   leave (Ctrl-D does too)
Ctrl-C stops an answer."""


@command
def chat(
    model: str,
    /,
    *,
    system: str | None = None,
    sampling: SamplingOptions = SAMPLING,
    engine: EngineOptions = ENGINE,
) -> None:
    """Talk with a model.

    Answers appear as they are written. /help shows the commands, Ctrl-C stops an answer, Ctrl-D leaves.

    Args:
        model: A folder, a .gguf file, a known name (see "forerun models list") or a hub id org/name.
        system: The system message that the conversation begins with.

    Examples:
        forerun chat smollm2-135m
        forerun chat smollm2-135m --system "You are a pirate." --temperature 0.7
        forerun chat smollm2-135m --speculative-config.method suffix
    """
    params = sampling.params()
    llm = loading.load_llm(model, engine)
    if not llm.get_tokenizer().has_chat_template:
        raise ModelError(
            f"{model}: has no chat template, which says how to put a question to it; use forerun generate, or the instruct "
            "version of the model"
        )
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        print(f"{model}, {llm.speculative.describe()}. /help shows the commands.")
    Conversation(llm, params, system=system).run(lambda: input("> " if on_terminal else ""))


@contextmanager
def _first_ctrl_c() -> Iterator[Event]:
    """Turn the first Ctrl-C into an event, so that it does not interrupt the engine in the middle of a step."""
    pressed = Event()

    def note(_signal: int, _frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


class Conversation:
    """The messages so far, and the loop that reads lines and answers them."""

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self._opening)
        self._commands: dict[str, Callable[[], None]] = {
            "/help": lambda: print(HELP),
            "/stats": self._print_stats,
            "/reset": self._reset,
        }

    def run(self, read_line: Callable[[], str]) -> None:
        """Answer line after line, until the end of input or /exit."""
        while True:
            try:
                line = read_line().strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit leaves)")
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        command = self._commands.get(line)
        if command is None:
            print(f"unknown command {line!r}{did_you_mean(line, (*self._commands, '/exit'))}")
            return
        command()

    def _answer(self, question: str) -> None:
        """Stream the answer and keep the part that was shown; drop the question if nothing was."""
        self.messages.append({"role": "user", "content": question})
        shown: ChatAnswer | None = None
        try:
            deltas, shown = ask(self._llm, self.messages, self._params)
            with _first_ctrl_c() as pressed:
                answer = read_answer(deltas, shown.add, stop=pressed.is_set)
            shown.end()
            print(self._remark(answer))
        except KeyboardInterrupt:
            print(" [stopped]")
        except WorkerError:
            raise  # no question can be answered any more
        except ForerunError as error:
            print(f"error: {error} (/reset forgets the conversation)", file=sys.stderr)
        message = None if shown is None else shown.message
        if message is None:
            self.messages.pop()
        else:
            self.messages.append(message)

    def _remark(self, answer: Answer) -> str:
        """A note after an answer that was stopped or cut off."""
        if answer.finish_reason is None:
            return " [stopped]"
        if answer.finish_reason != "length":
            return ""
        most = self._params.max_tokens
        is_full = most is None or len(answer.token_ids) < most
        return " [cut: the context is full]" if is_full else f" [cut at --max-tokens {most}]"

    def _reset(self) -> None:
        self.messages = list(self._opening)
        print("(forgotten)")

    def _print_stats(self) -> None:
        speculation = self._llm.stats.speculation
        rows = [("drafting", self._llm.speculative.describe()), *speculation_rows(speculation)]
        print("\n".join(f"{name}: {value}" for name, value in rows))
