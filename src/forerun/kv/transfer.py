"""KV on its way from one engine to another: the full blocks of a text's beginning, named by their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockContents:
    """What lies in some of a text's blocks in one cache.

    Attributes:
        places: which of the text's blocks they are, ascending.
        tensors: what `KVCache.read` gives of their slots, block after block.
    """

    places: tuple[int, ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferredKV:
    """The KV of the full blocks that a text begins with.

    Attributes:
        token_ids: of these blocks; their digests, which name the blocks in a prefix cache, follow from them.
        cache_salt: of the request.
        block_size: tokens of a block.
        caches: the target's cache with the features beside it, then those that the drafter keeps in the same blocks.
    """

    token_ids: tuple[int, ...]
    cache_salt: str | None
    block_size: int
    caches: tuple[BlockContents, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all contents."""
        return sum(tensor.nbytes for cache in self.caches for tensor in cache.tensors)
