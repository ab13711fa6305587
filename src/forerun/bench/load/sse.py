"""Server-sent events (WHATWG HTML, 9.2): the `data` of each, from bytes as they come."""

from __future__ import annotations


class EventStream:
    """Cuts bytes into events; an event may come in pieces, or several in one."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Take bytes; return the data of the events that they complete, comments left out."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = [self._take(line.removesuffix(b"\r")) for line in lines]
        return [data for data in events if data is not None]

    def close(self) -> list[bytes]:
        """The data of a last event that no blank line ended."""
        return self.feed(b"\n\n")

    def _take(self, line: bytes) -> bytes | None:
        """The data of an event that `line`, a blank one, ends."""
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            return None
        data, self._data = self._data, []
        return b"\n".join(data) if data else None
