"""Which block holds the KV of which token prefix, found by a chained hash."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence


class PrefixCache:
    """A one-to-one map between digests of full blocks and block ids.

    A digest names a block's tokens, all tokens before them, and the cache salt. It is SHA-256, not
    Python's `hash`: a collision would show one user's KV to another.
    """

    def __init__(self) -> None:
        self._block_by_digest: dict[bytes, int] = {}
        self._digest_by_block: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_by_digest)

    def __contains__(self, block: int) -> bool:
        return block in self._digest_by_block

    def find(self, digest: bytes) -> int | None:
        """The block with this content, None where there is none."""
        return self._block_by_digest.get(digest)

    def add(self, block: int, digest: bytes) -> None:
        """Make `block` findable; neither it nor `digest` may be here already."""
        self._block_by_digest[digest] = block
        self._digest_by_block[block] = digest

    def remove(self, block: int) -> bytes:
        """Forget `block`, which must be here; its digest."""
        digest = self._digest_by_block.pop(block)
        del self._block_by_digest[digest]
        return digest

    def clear(self) -> list[bytes]:
        """Forget every block; their digests."""
        digests = list(self._block_by_digest)
        self._block_by_digest.clear()
        self._digest_by_block.clear()
        return digests

    def is_one_to_one(self) -> bool:
        """Whether both directions of the map agree."""
        return len(self._block_by_digest) == len(self._digest_by_block) and all(
            self._block_by_digest.get(digest) == block for block, digest in self._digest_by_block.items()
        )


def root_digest(cache_salt: str | None) -> bytes:
    """Where the chain of a sequence starts: sequences with different salts share no digest."""
    salt = b"unsalted" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(salt).digest()


def block_digests(parent: bytes, token_ids: Sequence[int], *, block_size: int) -> Iterator[bytes]:
    """Digests of the full blocks of `token_ids`, lazily; a last, partial block has none.

    Each digest covers the one before it (`parent` for the first), so equal digests mean equal
    prefixes, not merely equal blocks.
    """
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        token_bytes = struct.pack(f"<{block_size}q", *token_ids[start : start + block_size])
        parent = hashlib.sha256(parent + token_bytes).digest()
        yield parent
