"""The engine in a thread of its own: requests go in, what each step gives comes out on the event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from forerun.core.outputs import RequestOutput, StreamDelta
from forerun.engine.client import EngineClient, EngineRequest
from forerun.errors import DeviceLostError, WorkerError

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEALTH_PERIOD_S = 1.0  # from one look at an engine without work to the next
FAILURES_IN_A_ROW = 3  # failed steps in a row after which `failure` reports them
LAST_STEP_S = 5.0  # for the step that runs when the server stops; nobody reads what it gives


class EngineError(Exception):
    """The engine failed a request. The message is for its client and says nothing of the reason, which is in the log."""


class EngineEndedError(EngineError):
    """The engine takes no requests any more, and gives nothing to those that it has."""


ENDED = "the engine has ended after an error; restart the server"
LOST = "the device computes no more; the server ends"
STOPPED = "the server is shutting down; send the request again later"


Event = StreamDelta | RequestOutput | EngineError
Command = Callable[[], None]
Observe = Callable[[Sequence[StreamDelta], Sequence[RequestOutput], float], None]
"""Takes the deltas of a step, the requests that ended with it, and the time of its end (monotonic, s)."""


class Reader(Protocol):
    """Takes the events of a request; called on the event loop."""

    streams: bool
    """Whether it takes deltas, or only the whole output at the end."""

    def take(self, event: Event) -> None:
        """Take a delta, the whole output, or the failure that ends it."""
        ...


class EngineThread:
    """Owns an engine: after `start` nothing else calls it, but for what any thread may (see `EngineClient`).

    Nothing that is asked of it ends the thread: a command that fails is logged and fails its own
    request at most. A step that fails ends the requests in flight and no others. Where what such a step left
    behind cannot be cleared away the engine ends. `failure` says whether the engine is well.

    Args:
        observe: called on the engine's thread with what each step gave, and with requests that were aborted.
        step_timeout: seconds that a step may take before `failure` reports it.
        when_lost: called on the engine's thread when the device is lost, after all requests have been told; whoever runs
            the process ends it, since no engine in it can compute again.
    """

    def __init__(
        self,
        engine: EngineClient,
        *,
        observe: Observe,
        step_timeout: float = math.inf,
        when_lost: Callable[[DeviceLostError], None] | None = None,
    ) -> None:
        self.engine = engine
        self._observe = observe
        self._when_lost = when_lost
        self._loss: DeviceLostError | None = None
        self._step_timeout = step_timeout
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._readers: dict[str, Reader] = {}  # touched by the engine's thread only, as all below
        self._events: list[tuple[Reader, Event]] = []
        self._num_failures = 0
        self._failure: str | None = None
        self._busy_since: float | None = None  # monotonic; None while the engine waits for work
        self._is_over = False
        self._reason = STOPPED  # the answer to requests that come when it is over
        self._gate = threading.Lock()  # no command is queued behind the last one that is carried out
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="forerun-engine", daemon=True)

    @property
    def failure(self) -> str | None:
        """What is wrong with the engine: it has ended, its last steps failed, or a step hangs; None if it is well."""
        since = self._busy_since
        if self._failure is None and since is not None and time.monotonic() - since > self._step_timeout:
            return f"a step of the engine has taken more than {self._step_timeout:g} s (--step-timeout) and goes on"
        return self._failure

    @property
    def is_running(self) -> bool:
        """Whether the thread has begun and not ended; after `stop`, whether a step hangs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin; what comes out goes to the event loop that is running now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, requests: Sequence[EngineRequest], reader: Reader) -> None:
        """Queue requests that the engine has accepted; all of them, or none and `reader` gets an `EngineError`.

        Raises:
            EngineEndedError: the engine has ended.
        """

        request_ids = [request.request_id for request in requests]

        def queue() -> None:
            try:
                for request_id in request_ids:
                    self.engine.submit(request_id)
            except Exception:
                self._events.append((reader, EngineError("the engine failed to take this request in")))
                self._hand_out()
                self._abort(request_ids)
                raise
            self._readers.update(dict.fromkeys(request_ids, reader))

        self._send(queue)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests before the next step; those that have ended are left alone."""

        def end() -> None:
            for request_id in request_ids:
                self._readers.pop(request_id, None)
            self._abort(request_ids)

        self._send(end)

    async def ask(self, question: Callable[[EngineClient], T]) -> T:
        """The engine's answer to a question, between two steps; a caller that is cancelled meanwhile is forgotten.

        Raises:
            EngineEndedError: the engine has ended.
        """
        answer: Future[T] = Future()

        def reply() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(question(self.engine))
            except BaseException as error:  # whatever it is, it is the caller's
                answer.set_exception(error)

        self._send(reply)
        return await asyncio.wrap_future(answer)

    def stop(self) -> None:
        """End the thread after the step that is running; requests in flight are aborted.

        A step that does not end soon is left to itself: the thread is a daemon, and ends with the process.
        """

        def finish() -> None:
            self._is_over = True

        self._commands.put(finish)
        if self._thread.is_alive():
            self._thread.join(LAST_STEP_S)
        if self._thread.is_alive():
            logger.error(
                "the step that was running has not ended within %g s; the engine's thread is left in it", LAST_STEP_S
            )

    def _send(self, command: Command) -> None:
        with self._gate:
            if self._is_closed:
                raise EngineEndedError(self._reason)
            self._commands.put(command)

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._obey()
                if self.engine.has_work and not self._is_over:
                    self._step()
        except BaseException:
            self._end("the engine ends after an error that nothing was there to contain")
        finally:
            self._close()
            if self._loss is not None and self._when_lost is not None:
                self._when_lost(self._loss)

    def _end(self, report: str, *, failure: str = "the engine has ended after an error", reason: str = ENDED) -> None:
        """Log the exception that is handled, and end the engine for it."""
        logger.exception(report)
        self._failure, self._reason = failure, reason
        self._is_over = True
        self._take_no_more()

    def _lose(self, error: WorkerError) -> None:
        """End the engine after the loss of what computes a part of the model."""
        if isinstance(error, DeviceLostError):
            self._loss = error
            self._end("the engine ends: its device computes no more", failure="the device is lost", reason=LOST)
        else:
            self._end("the engine ends: it cannot compute without the process that has ended")

    def _take_no_more(self) -> None:
        with self._gate:
            self._is_closed = True

    def _close(self) -> None:
        """Take no more commands, carry out those that are left, and end the requests in flight."""
        self._busy_since = None
        self._take_no_more()
        while not self._commands.empty():
            with suppress(Exception):  # the engine may be broken, which the log has said by now
                self._commands.get()()
        with suppress(Exception):
            self._abort(self._readers)
        self._fail_all(EngineEndedError(self._reason))

    def _obey(self) -> None:
        """Carry out the commands that are there; without work wait for one, and look whether the engine is well meanwhile."""
        if not self.engine.has_work:
            self._busy_since = None
            try:
                command = self._commands.get(timeout=HEALTH_PERIOD_S)
            except Empty:
                self._check_health()
                return
            self._busy_since = time.monotonic()
            self._carry_out(command)
        while not self._commands.empty():
            self._carry_out(self._commands.get())

    def _check_health(self) -> None:
        try:
            self.engine.check_health()
        except WorkerError as error:
            self._lose(error)

    def _carry_out(self, command: Command) -> None:
        """Carry out a command; one that fails is logged and harms no other."""
        try:
            command()
        except BaseException:
            logger.exception("a command to the engine failed; the engine goes on")

    def _step(self) -> None:
        start = self._busy_since = time.monotonic()
        try:
            output = self.engine.step()
        except WorkerError as error:  # a part of the model is gone, so no step will ever succeed again
            self._lose(error)
            return
        except Exception:
            self._survive()
            return
        self._num_failures, self._failure = 0, None
        self._note(output.deltas, output.finished)
        for delta in output.deltas:
            reader = self._readers.get(delta.request_id)
            if reader is not None and reader.streams:
                self._events.append((reader, delta))
        for finished in output.finished:
            reader = self._readers.pop(finished.request_id, None)
            if reader is not None:
                self._events.append((reader, finished))
        self._hand_out()
        if (seconds := time.monotonic() - start) > self._step_timeout:
            logger.warning("a step of the engine took %.0f s", seconds)

    def _survive(self) -> None:
        """After a failed step: end the requests in flight, so that the next ones find a clean engine."""
        logger.exception("a step of the engine failed; %d requests in flight end with it", len(self._readers))
        self._num_failures += 1
        if self._num_failures >= FAILURES_IN_A_ROW:
            self._failure = f"the engine's last {self._num_failures} steps failed"
        try:
            self._abort(self._readers)
        except Exception:
            self._end("the engine ends: what the failed step left behind cannot be cleared away")
        self._fail_all(EngineError("the engine failed on a step with this request in it"))

    def _abort(self, request_ids: Iterable[str]) -> None:
        ended = [output for request_id in request_ids if (output := self.engine.abort(request_id)) is not None]
        if ended:
            self._note([], ended)

    def _note(self, deltas: Sequence[StreamDelta], finished: Sequence[RequestOutput]) -> None:
        try:
            self._observe(deltas, finished, time.monotonic())
        except Exception:
            logger.exception("a step could not be counted in the metrics")

    def _fail_all(self, failure: EngineError) -> None:
        self._events += ((reader, failure) for reader in dict.fromkeys(self._readers.values()))
        self._readers.clear()
        self._hand_out()

    def _hand_out(self) -> None:
        """Give the event loop what came up: one wake-up per step, however many requests there are."""
        if self._events:
            events, self._events = self._events, []
            with suppress(RuntimeError):  # the loop is closed, and nobody reads any more
                self._loop.call_soon_threadsafe(_deliver, events)


def _deliver(events: Sequence[tuple[Reader, Event]]) -> None:
    for reader, event in events:
        reader.take(event)
