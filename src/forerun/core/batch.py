"""The tensors that one forward pass of the target takes and returns."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.core.host_arrays import HostArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """The rows that one sequence owns in a forward pass, for attention.

    The sequence has `num_context` tokens in the KV cache already; this pass adds `num_rows` rows,
    which are written to the next `num_rows` places of its block table; their positions lie in
    [num_context, num_context + num_rows). `block_ids` are its blocks in order, at least as many as
    all these places need; a contiguous view of the sequence's own table, good for this pass only.
    Each row sees the whole context and, among the new rows, those that `tree_mask` ([num_rows,
    num_rows] bool, row sees column) allows; None means causal. A wider mask, [num_rows, n + num_rows],
    also says which of the last n places of the context a row sees: a tree's earlier levels. The first
    `num_hidden` places hold no entry, and no row sees them.
    """

    num_context: int
    num_rows: int
    block_ids: npt.NDArray[np.int32]
    tree_mask: Tensor | None = None
    num_hidden: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Everything one forward pass of the target reads.

    T = rows of all sequences, packed one sequence after the other; R = rows whose logits are wanted.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, position for the rotary embedding (a tree node's is its depth)
    slot_mapping: Tensor  # [T] int64, block_id * block_size + offset: where the row's K and V go
    sequences: list[SequenceRows]
    block_size: int
    logits_rows: Tensor  # [R] int64, ascending
    features: frozenset[str] = field(default_factory=frozenset)  # what the drafter `needs`
    num_candidates: int = 0  # of each row of logits; at most MOST_CANDIDATES and vocab_size
    logits: Tensor | None = None  # [R, vocab_size] fp32, contiguous: where a pass may put its logits


MOST_CANDIDATES = 16
"""The most candidates that a pass finds for a row: `kMostCandidates` of ops/native/csrc/candidates.h."""


class Candidates(Protocol):
    """The likeliest next tokens of each row of logits, before any sampling rule.

    The highest logit comes first, of equal ones the lowest token id. NaN counts as higher than any
    number, so a row whose highest logit is not finite shows it in its first candidate. A row's
    candidates never depend on its batch.
    """

    @property
    def num_candidates(self) -> int:
        """Of each row."""
        ...

    @property
    def token_ids(self) -> Tensor:
        """[R, num_candidates] int32"""
        ...

    @property
    def logits(self) -> Tensor:
        """[R, num_candidates] fp32"""
        ...

    def first(self) -> tuple[list[int], list[float]]:
        """Each row's first candidate and its logit."""
        ...

    def on_host(self) -> tuple[HostArray, HostArray]:
        """All token ids (int32) and logits (fp32), row by row."""
        ...


@dataclass(frozen=True, slots=True)
class CandidateTensors:
    """Candidates as tensors of any device."""

    token_ids: Tensor
    logits: Tensor

    @property
    def num_candidates(self) -> int:
        """See `Candidates`."""
        return self.token_ids.shape[1]

    def first(self) -> tuple[list[int], list[float]]:
        """See `Candidates`."""
        return self.token_ids[:, 0].tolist(), self.logits[:, 0].tolist()

    def on_host(self) -> tuple[HostArray, HostArray]:
        """See `Candidates`."""
        return self.token_ids.numpy(force=True), self.logits.numpy(force=True)


class CandidateArrays:
    """Candidates in arrays of the standard library, which a pass of the kernels fills: `ids` and `values`, row by row."""

    __slots__ = ("ids", "num_candidates", "values")

    def __init__(self, num_rows: int, num_candidates: int) -> None:
        self.num_candidates = num_candidates
        self.ids = array("i", bytes(4 * num_rows * num_candidates))
        self.values = array("f", bytes(4 * num_rows * num_candidates))

    @property
    def token_ids(self) -> Tensor:
        """See `Candidates`."""
        return torch.tensor(self.ids, dtype=torch.int32).view(-1, self.num_candidates)

    @property
    def logits(self) -> Tensor:
        """See `Candidates`."""
        return torch.tensor(self.values, dtype=torch.float32).view(-1, self.num_candidates)

    def first(self) -> tuple[list[int], list[float]]:
        """See `Candidates`."""
        return self.ids[:: self.num_candidates].tolist(), self.values[:: self.num_candidates].tolist()

    def on_host(self) -> tuple[HostArray, HostArray]:
        """See `Candidates`."""
        return self.ids, self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """What one forward pass computed."""

    logits: Tensor  # [R, vocab_size] fp32
    candidates: Candidates | None = None  # None where the batch asks for none
    # name -> [T, width]; those that the pass has not written to its cache itself
    features: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKVSpec:
    """Shape of one layer's KV entries."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
