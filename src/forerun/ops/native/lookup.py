"""Drafts from look-ups in compiled code: one call for all sequences of a step; `drafters.lookup` has the definitions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from forerun.core.host_arrays import HostArray, address_of
from forerun.ops.native.library import Kernels
from forerun.ops.native.structs import LiveTextStruct, SaltContextsStruct, TextIndexStruct


class DraftLimits(NamedTuple):
    """Where a draft ends: nodes, depth, and the least chance with which a node stands."""

    max_nodes: int
    max_depth: int
    min_survival: float


class GrownTree(NamedTuple):
    """Nodes in falling order of `survival`, the chance that a node stands; node i continues node `parents[i]`, -1 is the root.

    `sources` says where each is from: 0 the text itself, 1 past answers, 2 the recycle table.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    survival: tuple[float, ...]
    sources: tuple[int, ...]


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


class Rows(Protocol):
    """What the target found at R rows with logits."""

    numbers: tuple[HostArray, HostArray, HostArray, HostArray]
    """[R] int64 the row's own token, [R] int64 the token before it (-1: there is none), [R, k] int32 candidates, likeliest first,
    [R, k] fp32 their logits."""


class CountsSlots(Protocol):
    """A table that counts its slots in use."""

    num_used: int


class Contexts(Protocol):
    """What is kept of one salt: the candidates after one token, and after two."""

    @property
    def struct(self) -> SaltContextsStruct:
        """The addresses of both tables."""
        ...

    @property
    def ones(self) -> CountsSlots:
        """The table by one token."""
        ...

    @property
    def twos(self) -> CountsSlots:
        """The table by two tokens."""
        ...


class NativeRows:
    """A step's rows, ready to be stored: the twin of `drafters.recycle_table.PlainRows`."""

    def __init__(self, kernels: Kernels, rows: Rows, num_candidates: int) -> None:  # noqa: ARG002 - the tables know it
        self._kernels = kernels
        token_ids, previous_ids, candidate_ids, logits = rows.numbers
        self._numbers = [  # keeps them alive
            _contiguous(token_ids, np.int64),
            _contiguous(previous_ids, np.int64),
            _contiguous(candidate_ids, np.int32),
            _contiguous(logits, np.float32),
        ]
        self._addresses = [address_of(one) for one in self._numbers]
        num_values = len(candidate_ids) if isinstance(candidate_ids, array) else candidate_ids.size
        self._stride = num_values // max(1, len(token_ids))

    def store(self, contexts: Contexts, first: int, end: int) -> None:
        """Store rows [first, end) under their tokens, and under the last two of them where there are two."""
        token_ids, previous_ids, candidate_ids, logits = self._addresses
        num_new = array("q", (0, 0))
        self._kernels.learn_rows(
            contexts.struct,
            token_ids + 8 * first,
            previous_ids + 8 * first,
            end - first,
            candidate_ids + 4 * first * self._stride,
            logits + 4 * first * self._stride,
            self._stride,
            address_of(num_new),
        )
        contexts.ones.num_used += num_new[0]
        contexts.twos.num_used += num_new[1]


class _Nodes:
    """Memory for the nodes of drafts, kept from step to step."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._token_ids, self._parents, self._sources = (array("i", bytes(4 * room)) for _ in range(3))
        self._survival = array("d", bytes(8 * room))
        arrays = (self._token_ids, self._parents, self._sources, self._survival)
        self.addresses = [address_of(one) for one in arrays]

    def tree(self, first: int, end: int) -> GrownTree:
        """The nodes [first, end)."""
        return GrownTree(
            tuple(self._token_ids[first:end]),
            tuple(self._parents[first:end]),
            tuple(self._survival[first:end]),
            tuple(self._sources[first:end]),
        )


class NativeLookup:
    """The twin of `drafters.lookup.algorithms.PlainLookup`; both give the same drafts and states, to the bit."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._rates: Rates | None = None
        self._rates_addresses = (0, 0)
        self._nodes = _Nodes(0)

    def extend(self, index: Index, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Append tokens to an index."""
        tokens = np.array(token_ids, dtype=np.int32)
        self._kernels.extend_text(index.struct, tokens.ctypes.data, len(tokens))

    def settle(self, text: Text) -> None:
        """Look up where the copies go on at the end of a text."""
        self._kernels.settle_text(text.struct)

    def take(self, texts: Sequence[Text], new_tokens: Sequence[Sequence[int]], rates: Rates) -> None:
        """Learn from each text's newly committed tokens, and append them."""
        # array.array, since a step has few values: its address comes ten times as fast as that of a NumPy array
        addresses = array("q", [text.address for text in texts])
        tokens = array("i", chain.from_iterable(new_tokens))
        first = array("q", accumulate(map(len, new_tokens), initial=0))
        self._kernels.take_tokens(
            address_of(addresses), len(texts), address_of(tokens), address_of(first), *self._addresses_of(rates)
        )

    def grow(self, texts: Sequence[Text], limits: Sequence[DraftLimits], rates: Rates) -> list[GrownTree]:
        """The best tree after each text."""
        sizes = array("q", [one.max_nodes for one in limits])
        room = sum(sizes)
        sizes.extend([one.max_depth for one in limits])
        addresses = array("q", [text.address for text in texts])
        min_survival = array("d", [one.min_survival for one in limits])
        num_nodes = array("q", bytes(8 * len(texts)))
        nodes = self._nodes
        if nodes.room < room:
            nodes = self._nodes = _Nodes(room)
        self._kernels.grow_drafts(
            *(address_of(addresses), len(texts), address_of(sizes), address_of(min_survival)),
            *(*self._addresses_of(rates), room, *nodes.addresses, address_of(num_nodes)),
        )
        trees, first = [], 0
        for count in num_nodes:
            trees.append(nodes.tree(first, first + count))
            first += count
        return trees

    def _addresses_of(self, rates: Rates) -> tuple[int, int]:
        """Where the counts and the weights lie; they stay there as long as `rates` lives."""
        if self._rates is not rates:
            self._rates = rates
            self._rates_addresses = rates.counts.ctypes.data, rates.gap_weights.ctypes.data
        return self._rates_addresses

    def to_store(self, rows: Rows, num_candidates: int) -> NativeRows:
        """A step's rows, ready to be stored in the recycle table with so many candidates."""
        return NativeRows(self._kernels, rows, num_candidates)


def _contiguous(numbers: HostArray, dtype: type[np.generic]) -> HostArray:
    return numbers if isinstance(numbers, array) else np.ascontiguousarray(numbers, dtype=dtype)
