"""Bit masks of the rows to be judged: what grammars and bad words leave there, which only the host can say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.core.draft import Draft
from forerun.errors import ForerunError
from forerun.ops.sampling import SamplingRules

Bools = npt.NDArray[np.bool_]


class JudgedSequence(NamedTuple):
    """A sequence with 1 + len(draft) rows to be judged: one after its last token, then one after each node."""

    rules: SamplingRules
    output_ids: list[int]
    draft: Draft


class RowMasks(NamedTuple):
    """The masks of R rows; token t is bit t % 32 of word t // 32.

    No token may come where nothing can be known, and where no draft can lead. `refused` says of a sequence, by its place
    among the judged ones, why nothing can be known after its last token.
    """

    masks: npt.NDArray[np.int32]  # [R, ceil(vocab_size / 32)]
    has_mask: npt.NDArray[np.int32]  # [R], 1 where the row has one
    refused: dict[int, ForerunError]


def row_masks(judged: Sequence[JudgedSequence], *, vocab_size: int) -> RowMasks | None:
    """Ask the rules of each sequence about all of its rows; None where no sequence has such rules."""
    if not any(one.rules.has_masks for one in judged):
        return None
    num_rows = sum(1 + len(one.draft) for one in judged)
    bits = np.zeros((num_rows, -(-vocab_size // 32) * 32), dtype=np.bool_)
    has_mask = np.zeros(num_rows, dtype=np.int32)
    refused: dict[int, ForerunError] = {}
    first = 0
    for i, one in enumerate(judged):
        end = first + 1 + len(one.draft)
        if one.rules.has_masks:
            has_mask[first:end] = 1
            try:
                _fill(bits[first:end, :vocab_size], one)
            except ForerunError as error:
                refused[i] = error
        first = end
    return RowMasks(packed(bits), has_mask, refused)


def packed(bits: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Bits [..., n * 32] as words [..., n]: entry t is bit t % 32 of word t // 32."""
    return np.packbits(bits, axis=-1, bitorder="little").view("<i4")


def _fill(allowed: Bools, one: JudgedSequence) -> None:
    """Write what may come after each place of a draft: [1 + len(draft), vocab_size], zeros before.

    Raises:
        ForerunError: nothing can be known after the last committed token. At a node this costs only what is drafted after it.
    """
    rules, output_ids, draft = one
    allowed[0] = rules.mask(output_ids)
    for node, token_id in enumerate(draft.token_ids):
        if not allowed[1 + draft.parent(node), token_id]:
            continue  # a node that cannot stand
        try:
            allowed[1 + node] = rules.mask(output_ids, [draft.token_ids[on_path] for on_path in draft.path(node)])
        except ForerunError:
            continue
