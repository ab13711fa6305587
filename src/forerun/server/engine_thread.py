"""The engine in a thread of its own: requests go in, what each step gives comes out to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol, TypeVar

from forerun.core.outputs import RequestOutput, StreamDelta
from forerun.engine.engine import Engine, StepOutput
from forerun.engine.request import Request

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAILURES_IN_A_ROW = 3  # failed steps, with none between that worked, that make a server ill


class EngineError(Exception):
    """The engine failed on a step, or has ended; nothing about the reason goes to clients."""


Event = StreamDelta | RequestOutput | EngineError
Command = Callable[[], None]


class Reader(Protocol):
    """Takes what the engine gives to a request; called on the event loop."""

    streams: bool
    """Whether it wants deltas, or only the whole at the end."""

    def take(self, event: Event) -> None:
        """Take a delta, the whole output, or the failure that ends it."""
        ...


class EngineThread:
    """Owns an engine: after `start` nothing else calls it, but for `Engine.accept` and `Engine.finish_files`.

    A step that fails ends the requests in flight and no others; the loop goes on. Where even that
    cannot be, or steps keep failing, `failure` says so.

    Args:
        observe: called on the engine's thread with what each step gave and with requests that were
            aborted, and the time (monotonic, s).
    """

    def __init__(self, engine: Engine, *, observe: Callable[[StepOutput, float], None]) -> None:
        self.engine = engine
        self.failure: str | None = None
        self._observe = observe
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._readers: dict[str, Reader] = {}  # touched by the engine's thread only, as all below
        self._events: list[tuple[Reader, Event]] = []
        self._num_failures = 0
        self._is_over = False
        self._gate = threading.Lock()  # nobody's command slips in behind the last one carried out
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)

    def start(self) -> None:
        """Begin; what comes out goes to the event loop that is running now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, requests: Sequence[Request], reader: Reader) -> None:
        """Queue requests that `Engine.accept` has made."""

        def enqueue() -> None:
            for request in requests:
                self._readers[request.request_id] = reader
                self.engine.enqueue(request)

        self._send(enqueue)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests before the next step; those that have ended are left alone."""

        def end() -> None:
            for request_id in request_ids:
                self._readers.pop(request_id, None)
            self._abort(request_ids)

        self._send(end)

    async def ask(self, question: Callable[[Engine], T]) -> T:
        """The engine's answer to a question, between two steps.

        Raises:
            EngineError: the engine has ended.
        """
        answer: Future[T] = Future()

        def reply() -> None:
            try:
                answer.set_result(question(self.engine))
            except Exception as error:
                answer.set_exception(error)

        self._send(reply)
        return await asyncio.wrap_future(answer)

    def stop(self) -> None:
        """End the thread after the step that is running; requests in flight are aborted."""

        def finish() -> None:
            self._is_over = True

        self._commands.put(finish)
        if self._thread.is_alive():
            self._thread.join()

    def _send(self, command: Command) -> None:
        with self._gate:
            if self._is_closed:
                raise EngineError("the engine has ended")
            self._commands.put(command)

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._obey()
                if self.engine.has_work and not self._is_over:
                    self._step()
            self._abort(self._readers)
        except Exception:
            self.failure = "the engine has ended after an error"
            logger.exception("the engine ends: what a failed step left behind could not be cleared away")
        finally:
            self._close()

    def _close(self) -> None:
        """Take no more commands, and fail the requests of those that are left."""
        with self._gate:
            self._is_closed = True
        while not self._commands.empty():
            with suppress(Exception):
                self._commands.get()()
        self._fail_all(EngineError("the engine has ended"))

    def _obey(self) -> None:
        """Carry out the commands that are there; without work wait for one."""
        if not self.engine.has_work:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _step(self) -> None:
        try:
            output = self.engine.step()
        except Exception:
            self._survive()
            return
        self._num_failures, self.failure = 0, None
        self._observe(output, time.monotonic())
        for delta in output.deltas:
            reader = self._readers.get(delta.request_id)
            if reader is not None and reader.streams:
                self._events.append((reader, delta))
        for finished in output.finished:
            reader = self._readers.pop(finished.request_id, None)
            if reader is not None:
                self._events.append((reader, finished))
        self._hand_out()

    def _survive(self) -> None:
        """After a failed step: end the requests in flight, so that the next ones find a clean engine."""
        logger.exception("a step of the engine failed; %d requests in flight end with it", len(self._readers))
        self._num_failures += 1
        if self._num_failures >= FAILURES_IN_A_ROW:
            self.failure = f"the engine's last {self._num_failures} steps failed"
        self._abort(self._readers)
        self._fail_all(EngineError("the engine failed on a step"))

    def _abort(self, request_ids: Iterable[str]) -> None:
        ended = [output for request_id in request_ids if (output := self.engine.abort(request_id)) is not None]
        if ended:
            self._observe(StepOutput(finished=ended), time.monotonic())

    def _fail_all(self, failure: EngineError) -> None:
        self._events += ((reader, failure) for reader in dict.fromkeys(self._readers.values()))
        self._readers.clear()
        self._hand_out()

    def _hand_out(self) -> None:
        """Give the event loop what came up: one wake-up per step, however many requests there are."""
        if self._events:
            events, self._events = self._events, []
            self._loop.call_soon_threadsafe(_deliver, events)


def _deliver(events: Sequence[tuple[Reader, Event]]) -> None:
    for reader, event in events:
        reader.take(event)
