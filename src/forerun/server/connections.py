"""Connections: how many may be open, and how long a client may take to send and to read."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.server.errors import ApiError

try:
    import resource
except ModuleNotFoundError:  # Windows, which has no such limits
    resource = None  # type: ignore[assignment]

LENGTHS = {b"content-length", b"transfer-encoding"}
UNANSWERED = (h11.IDLE, h11.SEND_RESPONSE)  # states in which an answer can begin
ARRIVING = (h11.IDLE, h11.SEND_BODY)  # a client's states in which the next request, or more of one, may come
LINGER_S = 1.0  # of silence, after which a client that was answered before it had sent all has read the answer
READ_BYTES = 8 << 10  # at a time: what the event loop gets through in hundredths of a second, in chunks of one byte too
OTHER_FILES = 256  # that are open besides connections: the model's, the process's own, and connections being closed


def room_for(most: int) -> int:
    """How many of `most` connections the limit on open files allows; raises that limit as far as the system lets it."""
    if resource is None:
        return most
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + OTHER_FILES
    if resource.RLIM_INFINITY != soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft - OTHER_FILES))


class ConnectionLimits:
    """The limits that all connections of a server share, and the connections that wait for their clients.

    Args:
        max_connections: connections that may be open.
        client_timeout: seconds that a client may take to send a request, or to read more of an answer.
    """

    def __init__(self, *, max_connections: int, client_timeout: float) -> None:
        self.max_connections, self.client_timeout = max_connections, client_timeout
        self.waiting: dict[Connection, None] = {}  # in order, the longest first


class Connection(H11Protocol):
    """uvicorn's connection, closed for a client that sends or reads too slowly.

    A connection waits for its client from the moment it opens, or has answered, to the end of the next request.
    The client's time runs from the first byte of that request, so that a byte now and then does not prolong
    it; between two requests only uvicorn's keep-alive counts. Where there are too many connections, the
    one that has waited longest is closed, so that there is always room for a request that comes at once.
    """

    def __init__(self, *args: Any, limits: ConnectionLimits, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._limits = limits
        self._arrival: asyncio.TimerHandle | None = None
        self._departure: asyncio.TimerHandle | None = None
        self._farewell: asyncio.TimerHandle | None = None  # set once nothing that comes is read any more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait; close the connection that waits longest if there are too many."""
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # asyncio's name, of its own transports
        if len(self.connections) > self._limits.max_connections:
            longest = next(iter(self._limits.waiting), self)
            longest.end(ApiError(503, "there are too many connections; try again later"))
        if not transport.is_closing():
            self._begin_to_wait()

    def data_received(self, data: bytes) -> None:
        """Take bytes; the first of a request start its time, the last stop it."""
        if self._farewell is not None:
            self._linger()
            return
        self._begin_to_wait()
        super().data_received(data)
        if self._farewell is None and self.conn.their_state not in ARRIVING:
            self._stop_waiting()

    def handle_events(self) -> None:
        """Begin to answer; a request of two lengths is the connection's last.

        Another server before this one may believe the Content-Length where this one goes by the
        Transfer-Encoding: what follows on the connection may then be no request (RFC 9112, section 6.3).
        """
        super().handle_events()
        if self.cycle is not None and self.cycle.transport is self.transport:
            self.cycle.transport = AnswerTransport(self)  # type: ignore[assignment]
        if self.cycle is not None and {name for name, _ in self.cycle.scope["headers"]} >= LENGTHS:
            others = [header for header in self.headers if header[0] != b"connection"]
            self.cycle.scope["headers"] = [*others, (b"connection", b"close")]

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, or has too many headers; behind an answer there is nothing left to say."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if self.conn.our_state in UNANSWERED:
            self._write(ApiError(status, "headers: are too large" if status == 431 else f"request: {msg}"))
        if self.cycle is not None:
            self.cycle.disconnected = True  # an answer that is on its way comes too late
            self.cycle.message_event.set()
        self._part()

    def close_answered(self) -> None:
        """Close the connection behind its last answer, once the client can have read it."""
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._part()
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Wait for the next request; its time starts with its first byte, or now if that came during the answer."""
        super().on_response_complete()
        if self.transport.is_closing() or self.conn.their_state not in ARRIVING:
            return
        if self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            self._begin_to_wait()
        else:
            self._limits.waiting.setdefault(self)

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection on which no request came, at once if its client has stopped reading."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def pause_writing(self) -> None:
        """Start the time of a client that does not read."""
        super().pause_writing()
        self._departure = self._departure or self.loop.call_later(self._limits.client_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the time of a client that reads again."""
        super().resume_writing()
        self._stop_departing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers."""
        self._stop_waiting()
        self._stop_departing()
        if self._farewell is not None:
            self._farewell.cancel()
        super().connection_lost(exc)

    def end(self, reason: ApiError) -> None:
        """Close the connection; answer first if a request has begun or the connection is new."""
        is_answered = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0] or not self._is_waiting
        if is_answered and self.conn.our_state in UNANSWERED and not self.transport.is_closing():
            self._write(reason)
        self._stop_waiting()
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _write(self, reason: ApiError) -> None:
        body = json.dumps(reason.body).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
        response = h11.Response(status_code=reason.status_code, headers=list(headers.items()))
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def _part(self) -> None:
        """Write no more, and drop what still comes, until the client closes, falls silent, or its time is over.

        A connection that is closed over bytes that nobody has read is reset, and with it goes the answer.
        """
        self._begin_to_wait()
        self._linger()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _linger(self) -> None:
        if self._farewell is not None:
            self._farewell.cancel()
        self._farewell = self.loop.call_later(LINGER_S, self.transport.close)

    @property
    def _is_waiting(self) -> bool:
        return self in self._limits.waiting

    def _begin_to_wait(self) -> None:
        self._limits.waiting.setdefault(self)
        if self._arrival is None:
            self._arrival = self.loop.call_later(self._limits.client_timeout, self._give_up)

    def _stop_waiting(self) -> None:
        self._limits.waiting.pop(self, None)
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _stop_departing(self) -> None:
        if self._departure is not None:
            self._departure.cancel()
            self._departure = None

    def _give_up(self) -> None:
        self.end(ApiError(408, f"the request did not arrive within {self._limits.client_timeout:g} s; send it faster"))


class AnswerTransport:
    """What uvicorn writes an answer to; the connection closes it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        """Send bytes."""
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        """Whether the connection is closed, or about to be."""
        return self._connection.transport.is_closing()

    def close(self) -> None:
        """See `Connection.close_answered`."""
        self._connection.close_answered()
