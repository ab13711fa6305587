"""Drafts from look-ups in compiled code: one call for all sequences of a step; `drafters.lookup` has the definitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from forerun.ops.native.library import Kernels
from forerun.ops.native.structs import LiveTextStruct, TextIndexStruct


class DraftLimits(NamedTuple):
    """Where a draft ends: nodes, depth, and the least chance with which a node stands."""

    max_nodes: int
    max_depth: int
    min_survival: float


class GrownTree(NamedTuple):
    """Nodes in falling order of `survival`, the chance that a node stands; node i continues node `parents[i]`, -1 is the root.

    `sources` says where each is from: 0 the text itself, 1 past answers, 2 the recycle table.
    """

    token_ids: list[int]
    parents: list[int]
    survival: list[float]
    sources: list[int]


class Index(Protocol):
    """An index of texts."""

    @property
    def struct(self) -> TextIndexStruct:
        """Its arrays and where it ends."""
        ...


class Text(Protocol):
    """The text of a running sequence."""

    @property
    def struct(self) -> LiveTextStruct:
        """Its index and what else a step changes."""
        ...

    @property
    def address(self) -> int:
        """Where `struct` lies."""
        ...


class Rates(Protocol):
    """How often guesses are right."""

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """A row for each class of guesses."""
        ...

    @property
    def gap_weights(self) -> npt.NDArray[np.float64]:
        """What a candidate weighs, by how far its logit lies below the first one's: [256]"""
        ...


class NativeLookup:
    """The twin of `drafters.lookup.algorithms.PlainLookup`; both give the same drafts and states, to the bit."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def extend(self, index: Index, token_ids: Sequence[int]) -> None:
        """Append tokens to an index."""
        tokens = np.array(token_ids, dtype=np.int32)
        self._kernels.extend_text(index.struct, tokens.ctypes.data, len(tokens))

    def settle(self, text: Text) -> None:
        """Look up where the copies go on at the end of a text."""
        self._kernels.settle_text(text.struct)

    def take(self, texts: Sequence[Text], new_tokens: Sequence[Sequence[int]], rates: Rates) -> None:
        """Learn from each text's newly committed tokens, and append them."""
        addresses = np.array([text.address for text in texts], dtype=np.int64)
        tokens = np.array([token_id for new in new_tokens for token_id in new], dtype=np.int32)
        first = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum([len(new) for new in new_tokens], out=first[1:])
        self._kernels.take_tokens(
            addresses.ctypes.data,
            len(texts),
            tokens.ctypes.data,
            first.ctypes.data,
            rates.counts.ctypes.data,
            rates.gap_weights.ctypes.data,
        )

    def grow(self, texts: Sequence[Text], limits: Sequence[DraftLimits], rates: Rates) -> list[GrownTree]:
        """The best tree after each text."""
        addresses = np.array([text.address for text in texts], dtype=np.int64)
        sizes = np.array([limit[:2] for limit in limits], dtype=np.int64)
        min_survival = np.array([limit.min_survival for limit in limits], dtype=np.float64)
        room = sum(limit.max_nodes for limit in limits)
        token_ids, parents, sources = np.empty((3, room), dtype=np.int32)
        survival = np.empty(room, dtype=np.float64)
        num_nodes = np.empty(len(texts), dtype=np.int64)
        self._kernels.grow_drafts(
            addresses.ctypes.data,
            len(texts),
            sizes.ctypes.data,
            min_survival.ctypes.data,
            rates.counts.ctypes.data,
            rates.gap_weights.ctypes.data,
            room,
            token_ids.ctypes.data,
            parents.ctypes.data,
            sources.ctypes.data,
            survival.ctypes.data,
            num_nodes.ctypes.data,
        )
        counts = num_nodes.tolist()
        total = sum(counts)
        nodes = [array[:total].tolist() for array in (token_ids, parents, survival, sources)]
        trees, first = [], 0
        for count in counts:
            trees.append(GrownTree(*(values[first : first + count] for values in nodes)))
            first += count
        return trees
