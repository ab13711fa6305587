"""The seam between engine and drafters."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from forerun.core.draft import Draft
from forerun.core.sequence import Sequence
from forerun.kv.cache import KVCache
from forerun.models.loaded import LoadedTarget
from forerun.ops.sampling import SamplingRules

NO_BLOCKS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """What a drafter may know of the target when it is built."""

    vocab_size: int  # token ids are below this
    max_model_len: int  # no sequence has more tokens
    num_speculative_tokens: int  # the most nodes any draft may have
    max_num_seqs: int = 1  # the most sequences in a step
    max_num_batched_tokens: int = 2048  # the most tokens that the target reads in a step
    block_size: int = 16  # KV places in a block
    loaded: LoadedTarget | None = None  # None where a drafter is tried out alone

    @property
    def itself(self) -> LoadedTarget:
        """The loaded target, for drafters that share its parts."""
        assert self.loaded is not None, "the engine gives it"
        return self.loaded


class DrafterConfig(Protocol):
    """A drafter's own settings: a frozen dataclass whose field names are the user's keys.

    Its `__post_init__` raises `ConfigError` for a value out of range.
    """

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """K where the user gives none; None: the user must give it."""
        ...

    def build(self, target: TargetInfo) -> Drafter:
        """Make the drafter."""
        ...


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence that may get a draft: at most `max_tokens` nodes, at most `max_depth` deep.

    The target's KV of its first `num_computed` tokens lies in the blocks `block_ids` (a view, good for
    this call); the last committed token is not among them yet. `rules` are its sampling rules.
    """

    sequence: Sequence
    max_tokens: int
    max_depth: int
    num_computed: int = 0
    block_ids: npt.NDArray[np.int32] = field(default_factory=NO_BLOCKS.view)
    rules: SamplingRules | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """What a drafter sees of a step: the sequences to draft for, and the features it asked for.

    `features` maps each name in the drafter's `needs` to [num_slots, width]: the target's hidden state
    after each token, at the slot (block id * block size + offset) of the token's place. Those of a
    request's first `num_computed` tokens are there, wherever the tokens came from: an earlier step, a
    prompt in chunks, the prefix cache.
    """

    requests: Listing[DraftRequest]
    features: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class ExportsFeatures(Protocol):
    """Settings of a method that drafts nothing: its features go to a file when a sequence ends."""

    @property
    def exported(self) -> tuple[str, ...]:
        """The features' names, in their order in the file."""
        ...


class Drafter(Protocol):
    """Bets on the next tokens. It may be wrong, late or silent; the output stays exact.

    `needs` names the target's features that are kept for it: "last_hidden", after the final norm, or
    "hidden.N", the residual stream before layer N; most drafters need none.
    """

    needs: frozenset[str]

    def start(self, sequence: Sequence) -> None:
        """A sequence has its first step: its prompt is known, perhaps its first tokens too."""
        ...

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return one draft per request, in order; `NO_DRAFT` where there is no bet worth making.

        Steps in which a sequence gets no draft are not reported: catch up from its committed
        tokens. A draft over the request's limits is cut.
        """
        ...

    def stop(self, sequence: Sequence) -> None:
        """A sequence has ended, finished or aborted; its tokens are final."""
        ...


@runtime_checkable
class KeepsKV(Protocol):
    """A drafter with KV: entries of its own for each of the target's blocks, or in the target's own layers.

    Its entries of a text lie in the target's blocks, under the same ids, so that a block found by its
    prefix serves both. What a draft writes beyond the committed text goes to scratch blocks, which no
    sequence ever holds.
    """

    kv_bytes_per_block: int  # of its own entries for one of the target's blocks; 0: it uses the target's
    num_scratch_blocks: int

    def use_kv(self, target_cache: KVCache, *, num_blocks: int) -> None:
        """Take the memory, once, before the first sequence: the scratch blocks follow the `num_blocks` of the sequences."""
        ...
