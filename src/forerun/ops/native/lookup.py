"""Drafts from look-ups in compiled code: one call for all sequences of a step; `drafters.lookup` has the definitions."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

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
    """What the target found at rows with logits."""

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """[R] the row's own token"""
        ...

    @property
    def previous_ids(self) -> npt.NDArray[np.int64]:
        """[R] the token before it; -1: there is none."""
        ...

    @property
    def candidate_ids(self) -> npt.NDArray[np.int32]:
        """[R, k], likeliest first"""
        ...

    @property
    def candidate_logits(self) -> npt.NDArray[np.float32]:
        """[R, k], falling"""
        ...


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
        self._token_ids = np.ascontiguousarray(rows.token_ids, dtype=np.int64)
        self._previous_ids = np.ascontiguousarray(rows.previous_ids, dtype=np.int64)
        self._candidate_ids = np.ascontiguousarray(rows.candidate_ids, dtype=np.int32)
        self._logits = np.ascontiguousarray(rows.candidate_logits, dtype=np.float32)
        arrays = (self._token_ids, self._previous_ids, self._candidate_ids, self._logits)
        self._addresses = [array.ctypes.data for array in arrays]
        self._stride = self._logits.shape[1]

    def store(self, contexts: Contexts, first: int, end: int) -> None:
        """Store rows [first, end) under their tokens, and under the last two of them where there are two."""
        token_ids, previous_ids, candidate_ids, logits = self._addresses
        num_new = (c_int64 * 2)()
        self._kernels.learn_rows(
            contexts.struct,
            token_ids + 8 * first,
            previous_ids + 8 * first,
            end - first,
            candidate_ids + 4 * first * self._stride,
            logits + 4 * first * self._stride,
            self._stride,
            num_new,
        )
        contexts.ones.num_used += num_new[0]
        contexts.twos.num_used += num_new[1]


class NativeLookup:
    """The twin of `drafters.lookup.algorithms.PlainLookup`; both give the same drafts and states, to the bit."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def extend(self, index: Index, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
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
        max_nodes, max_depths, min_survivals = zip(*limits, strict=True) if limits else ((), (), ())
        sizes = np.array([max_nodes, max_depths], dtype=np.int64)
        min_survival = np.array(min_survivals, dtype=np.float64)
        room = sum(max_nodes)
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
        ids, above, chances, origins = (
            tuple(array[:total].tolist()) for array in (token_ids, parents, survival, sources)
        )
        trees, first = [], 0
        for count in counts:
            end = first + count
            trees.append(GrownTree(ids[first:end], above[first:end], chances[first:end], origins[first:end]))
            first = end
        return trees

    def to_store(self, rows: Rows, num_candidates: int) -> NativeRows:
        """A step's rows, ready to be stored in the recycle table with so many candidates."""
        return NativeRows(self._kernels, rows, num_candidates)
