"""What changes in the prefix cache, told to whoever routes requests to where their beginning is cached."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block can be found from now on.

    `digest` names its tokens and all before them (see `prefix_cache.block_digests`); `parent` is the digest of the
    block before it, None for a sequence's first.
    """

    digest: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A block cannot be found any more."""

    digest: bytes


BlockEvent = BlockStored | BlockRemoved


class BlockEventLog:
    """Collects the events of one pool, in order, until they are taken; for one thread."""

    def __init__(self) -> None:
        self._events: list[BlockEvent] = []

    def add(self, event: BlockEvent) -> None:
        """Append an event."""
        self._events.append(event)

    def take(self) -> list[BlockEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events
