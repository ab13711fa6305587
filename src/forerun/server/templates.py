"""Chat templates, run where they can do no harm: in processes with little time, little memory and no secrets.

The file is also the program of those processes: it runs by its path, and so does not import the server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from forerun.models.chat_template import render

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]

MOST_SECONDS = 5.0  # of CPU, for one conversation
MOST_WALL_SECONDS = 10.0  # where no CPU time can be measured, as on Windows
MOST_TEXT_BYTES = 16 << 20  # of one conversation's text, as JSON
MOST_MEMORY_BYTES = 2 << 30  # of a process's address space
ENVIRONMENT = (
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONPATH",
    "TZ",
)  # variables that the processes inherit; the API keys are not among them
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Templates:
    """Lays conversations out in other processes, one for each thread that asks at the same time."""

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[bytes]] = []  # several threads pop and append, which are atomic
        self._busy: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def prepare(self) -> None:
        """Start a process, so that the first conversation need not wait for that."""
        self._idle.append(_start())

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of a conversation; see `chat_template.render`.

        Raises:
            TemplateError: the template refuses the conversation, or takes too much for it.
        """
        question = json.dumps({"template": template, "messages": messages, **options}).encode()
        process = self._take()
        self._busy.add(process)
        try:
            answer = _ask(process, question)
        except BaseException:
            _end(process)
            raise
        finally:
            self._busy.discard(process)
        self._idle.append(process)
        if self._is_closed:  # since it was taken, or by now: whichever of the two looks last finds it
            self.close()
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer["text"]

    def close(self) -> None:
        """End the processes, those that lay something out too."""
        self._is_closed = True
        for busy in self._busy.copy():
            busy.kill()
        while (process := self._pop()) is not None:
            _end(process)

    def _take(self) -> subprocess.Popen[bytes]:
        while (process := self._pop()) is not None:
            if process.poll() is None:
                return process
            _end(process)
        return _start()

    def _pop(self) -> subprocess.Popen[bytes] | None:
        try:
            return self._idle.pop()
        except IndexError:  # none is left; to look before would be too early, as other threads take too
            return None


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__)), str(MOST_SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | ONE_THREAD,
        start_new_session=True,  # Ctrl-C is the server's, which lets what runs finish
    )


def _ask(process: subprocess.Popen[bytes], question: bytes) -> dict[str, str]:
    """The program's answer; where this raises, the process cannot be used again."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(question + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it died, and the empty answer says so
    with _deadline(process) as is_over:
        line = process.stdout.readline(MOST_TEXT_BYTES)
    if line.endswith(b"\n"):
        answer: dict[str, str] = json.loads(line)
        return answer
    if line:
        raise TemplateError("it makes too long a text of them")
    if process.wait() > 0 and not is_over.is_set():
        raise RuntimeError("the program that runs chat templates has failed; it says why on standard error")
    raise TemplateError("it takes too long or too much memory")


@contextmanager
def _deadline(process: subprocess.Popen[bytes]) -> Iterator[threading.Event]:
    """Kill a process that takes too long, where the system has no timer of CPU time; the event is set if it was killed."""
    is_over = threading.Event()
    if hasattr(signal, "setitimer"):
        yield is_over
        return

    def kill() -> None:
        is_over.set()
        process.kill()

    timer = threading.Timer(MOST_WALL_SECONDS, kill)
    timer.start()
    try:
        yield is_over
    finally:
        timer.cancel()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


# --- the program -----------------------------------------------------------------------------------


def main() -> None:
    """Answer each line of standard input, the arguments of `chat_template.render` as JSON, by a line of JSON.

    The line is {"text": ...} or {"error": ...}. The program's argument is the CPU time for one conversation, in
    seconds; where a conversation takes longer, the timer kills the process.
    """
    seconds = float(sys.argv[1])
    _limit_process()
    for line in sys.stdin:
        _set_timer(seconds)
        answer = json.dumps(_lay_out(json.loads(line)))
        _set_timer(0)
        print(answer, flush=True)


def _lay_out(arguments: dict[str, Any]) -> dict[str, str]:
    """The conversation's text, or why there is none."""
    try:
        return {"text": render(**arguments)}
    except Exception as error:  # a template may raise whatever Python can
        said, kind = str(error), type(error).__name__
        return {"error": f"{kind}: {said}" if isinstance(error, KeyError) else said or kind}


def _limit_process() -> None:
    """Limit this process's memory and files, as far as the system can (macOS has no limit on memory, Windows none)."""
    if resource is None:
        return
    for name, most in (("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 0), ("RLIMIT_AS", MOST_MEMORY_BYTES)):
        with suppress(AttributeError, OSError, ValueError):  # macOS refuses RLIMIT_AS
            resource.setrlimit(getattr(resource, name), (most, most))


def _set_timer(seconds: float) -> None:
    """Let the process be killed after so much CPU time; 0 stops the timer."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
