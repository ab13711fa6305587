"""Chains of tokens drafted by a small head, all its passes in one call of the kernels."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from ctypes import pointer
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from forerun.core.host_arrays import address_of
from forerun.core.random_bits import MASK
from forerun.ops.layers import Embedding
from forerun.ops.native.attention import CacheAddresses
from forerun.ops.native.inputs import RotationTables, token_table
from forerun.ops.native.layers import NativeLayers, NativeRMSNorm, PackedEmbedding, PackedLinear
from forerun.ops.native.library import Kernels
from forerun.ops.native.sampling import settings_address
from forerun.ops.native.structs import DraftHeadStruct
from forerun.ops.rotary import RotaryTable
from forerun.ops.sampling import SamplingRules


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainHeadParts:
    """An EAGLE-3 head on the kernels.

    Attributes:
        embedding: of the target's tokens, as wide as what the first layer reads beside its stream.
        fusion: makes a state of a token's features; None: its only feature is its state.
        feature_norms: of all features together (one) or of each, before the fusion; or none.
        features: the names of the target's hidden states that it reads, in order.
        feature_width: the target's hidden_size.
        layers: the decoder layers, the first of which reads embeddings beside states.
        rotaries: the distinct rotations that the layers take, from number 1 on.
        norm: before the vocabulary.
        vocabulary: a product with the outputs' weights.
        logit_factor: times the product; a soft cap of `logit_cap` follows (0: none).
        logit_cap: see `logit_factor`.
        target_ids: the target's token of each output, [V] int64 ascending, or None if they are the same.
        feeds_normed: a drafted token is read with the output after the norm, instead of before it.
    """

    embedding: PackedEmbedding | Embedding
    fusion: PackedLinear | None
    feature_norms: Sequence[NativeRMSNorm]
    features: tuple[str, ...]
    feature_width: int
    layers: NativeLayers
    rotaries: Sequence[RotaryTable]
    norm: NativeRMSNorm
    vocabulary: PackedLinear
    logit_factor: float
    logit_cap: float
    target_ids: Tensor | None
    feeds_normed: bool


@dataclass(frozen=True, slots=True)
class ChainText:
    """A text whose entries at the places below `num_read` are in `block_ids`.

    `token_ids` are its tokens at the places from there on. `num_drafted` tokens are drafted after them;
    `block_ids` (int32) has blocks for the places of all but the last. They are the likeliest ones, or those that win the races which
    the target will run by `rules` with the noise of `seed`. A chain ends behind a token by which the product of the `chances` of
    its tokens, by the classes of their margins, falls below `least_chance`.
    """

    block_ids: array[int]
    num_read: int
    token_ids: list[int]
    num_drafted: int
    rules: SamplingRules | None = None
    seed: int = 0
    least_chance: float = 0.0
    chances: array[float] | None = None


class DraftedChain(NamedTuple):
    """A chain that was drafted after a text.

    `levels` has at each depth the chain's token, and then its runners-up: the next likeliest tokens, or the next ones of the
    race. `margins` say how far each token is ahead of its first runner-up, in logits or in scores of the race: NaN where none
    was asked for, infinite where there is none.
    """

    levels: list[list[int]]
    margins: list[float]


class NativeChains:
    """Drafts with an EAGLE-3 head; the twin of its passes one by one (`drafters.neural.writers.ChainWriter`)."""

    def __init__(self, kernels: Kernels, parts: ChainHeadParts) -> None:
        self._kernels = kernels
        self._parts = parts  # keeps the tensors alive whose addresses are in the struct
        norms = [norm.weight for norm in parts.feature_norms]
        self._feature_norm = None if not norms else np.concatenate([weight.numpy() for weight in norms])
        self._struct = DraftHeadStruct(
            embedding=token_table(parts.embedding),
            fusion=None if parts.fusion is None else pointer(parts.fusion.weight.struct),
            feature_norm=None if self._feature_norm is None else self._feature_norm.ctypes.data,
            feature_norm_width=len(norms[0]) if norms else 0,
            num_features=len(parts.features),
            feature_width=parts.feature_width,
            layers=parts.layers.places[0],
            rotation_of=parts.layers.places[1],
            num_layers=len(parts.layers.layers),
            output_norm=parts.norm.weight.data_ptr(),
            vocabulary=pointer(parts.vocabulary.weight.struct),
            target_ids=None if parts.target_ids is None else parts.target_ids.data_ptr(),
            num_outputs=parts.vocabulary.weight.outputs,
            norm_eps=parts.norm.eps,
            logit_factor=parts.logit_factor,
            logit_cap=parts.logit_cap,
            feeds_normed=parts.feeds_normed,
        )
        self._rotations = RotationTables(parts.rotaries)
        self._hidden_states: Mapping[str, Tensor] = {}  # of the last call, and where they are
        self._feature_addresses = array("q")

    def draft(
        self,
        texts: Sequence[ChainText],
        hidden_states: Mapping[str, Tensor],
        cache: CacheAddresses,
        *,
        block_size: int,
        num_runners_up: int = 0,
    ) -> list[DraftedChain]:
        """Draft a chain after each text; the cache gets entries of all its tokens but the last.

        A chain ends early where nothing can be drafted, or hardly anything would stand.

        Args:
            texts: each with at least one token.
            hidden_states: the target's, name -> [num_slots, feature_width], of the dtype of the drafter's keys.
            cache: the drafter's.
            block_size: of the target's cache and the drafter's.
            num_runners_up: wanted beside each token, below `MOST_CANDIDATES`.

        Raises:
            ValueError: a text's blocks do not hold its draft, or a token is not in the vocabulary.
        """
        # arrays of the standard library: after a pass of the target, NumPy's own calls come from memory
        most, most_places = 0, 0
        words, token_ids, least_chances = array("Q"), array("q"), array("d", [text.least_chance for text in texts])
        bits_of_chances = memoryview(least_chances).cast("B").cast("Q")
        for text, least_chance in zip(texts, bits_of_chances, strict=True):
            num_unread, num_drafted = len(text.token_ids), text.num_drafted
            settings = 0 if text.rules is None else settings_address(text.rules)
            blocks = text.block_ids
            words.extend((address_of(blocks), len(blocks), text.num_read, num_unread, num_drafted))
            chances_at = 0 if text.chances is None else address_of(text.chances)
            words.extend((text.seed & MASK, settings, least_chance, chances_at))
            token_ids.extend(text.token_ids)
            most = max(most, num_drafted)
            most_places = max(most_places, text.num_read + num_unread + num_drafted)
        if hidden_states is not self._hidden_states:
            self._hidden_states = hidden_states
            self._feature_addresses = array("q", [hidden_states[name].data_ptr() for name in self._parts.features])
        width = 1 + num_runners_up
        drafted, margins = array("q", bytes(8 * most * width * len(texts))), array("f", bytes(4 * most * len(texts)))
        tables = self._rotations.of_first(most_places)
        keys, values = cache.arrays(0)
        self._kernels.draft_chains(
            *(self._struct, tables.structs, tables.num_tables, address_of(words), len(texts), block_size),
            *(address_of(token_ids), address_of(self._feature_addresses), cache.storage, keys, values),
            *(most, width, address_of(drafted), address_of(margins)),
        )
        levels = [drafted[first : first + width].tolist() for first in range(0, len(drafted), width)]
        chains = []
        for row, text in enumerate(texts):
            first = row * most
            of_text = _until_none(levels[first : first + text.num_drafted])
            chains.append(DraftedChain(of_text, margins[first : first + len(of_text)].tolist()))
        return chains


def _until_none(levels: list[list[int]]) -> list[list[int]]:
    """The levels of a draft up to the first without tokens; -1 stands where a level has fewer than others."""
    found = []
    for level in levels:
        if level[0] < 0:
            break
        found.append(level[: level.index(-1)] if level[-1] < 0 else level)
    return found
