"""What the prefix cache holds, told to Dynamo's router."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from forerun.kv.block_pool import BlockPool
from forerun.kv.events import BlockEvent, BlockEventLog, BlockRemoved, BlockStored


class Publisher(Protocol):
    """What is used of Dynamo's `KvEventPublisher`."""

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
        *,
        cache_salt: str | None = None,
    ) -> None:
        """Tell of blocks that follow each other, the first one after the block `parent_hash`."""
        ...

    def publish_removed(self, block_hashes: list[int]) -> None:
        """Tell of blocks that are gone."""
        ...


@dataclass(slots=True)
class StoredBlocks:
    """Blocks that follow each other in one text."""

    parent: int | None
    cache_salt: str | None
    token_ids: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RemovedBlocks:
    """Blocks that are gone."""

    hashes: list[int] = field(default_factory=list)


class KVEvents:
    """Publishes the events of a pool, in their order; used by the engine's thread, but for `attach`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._publisher: Publisher | None = None

    def attach(self, publisher: Publisher) -> None:
        """Publish there from now on; to be called before the pool is used."""
        self._publisher = publisher
        self._pool.events = BlockEventLog()

    def publish(self) -> None:
        """Publish what has happened since the last call."""
        publisher, log = self._publisher, self._pool.events
        if publisher is None or log is None:
            return
        for some in runs(log.take()):
            if isinstance(some, RemovedBlocks):
                publisher.publish_removed(some.hashes)
                continue
            size = len(some.token_ids) // len(some.hashes)
            publisher.publish_stored(
                token_ids=some.token_ids,
                num_block_tokens=[size] * len(some.hashes),
                block_hashes=some.hashes,
                parent_hash=some.parent,
                cache_salt=some.cache_salt,
            )


def block_hash(digest: bytes) -> int:
    """A block's name as Dynamo takes it: the first 64 bits of its digest, as a signed integer."""
    return int.from_bytes(digest[:8], "little", signed=True)


def runs(events: Iterable[BlockEvent]) -> Iterator[StoredBlocks | RemovedBlocks]:
    """Events put together as far as that keeps their order: blocks that follow each other, and blocks that are gone."""
    run: StoredBlocks | RemovedBlocks | None = None
    for event in events:
        if run is not None and not _continues(run, event):
            yield run
            run = None
        match event:
            case BlockStored():
                if not isinstance(run, StoredBlocks):
                    parent = None if event.parent is None else block_hash(event.parent)
                    run = StoredBlocks(parent, event.cache_salt)
                run.token_ids += event.token_ids
            case BlockRemoved():
                run = run if isinstance(run, RemovedBlocks) else RemovedBlocks()
        run.hashes.append(block_hash(event.digest))
    if run is not None:
        yield run


def _continues(run: StoredBlocks | RemovedBlocks, event: BlockEvent) -> bool:
    if isinstance(event, BlockRemoved):
        return isinstance(run, RemovedBlocks)
    if isinstance(run, RemovedBlocks) or event.parent is None:
        return False
    return run.hashes[-1] == block_hash(event.parent) and run.cache_salt == event.cache_salt
