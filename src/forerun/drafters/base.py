"""The interface of drafters, and the drafter that drafts nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.host_arrays import HostArray, as_numpy
from forerun.drafters.margins import EarlyStop

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from forerun.core.sequence import Sequence
    from forerun.kv.cache import KVCache
    from forerun.models.base import LoadedTarget
    from forerun.ops.sampling import SamplingRules

NO_BLOCKS = np.empty(0, dtype=np.int32)

VERIFIER, MATCHING = "rejection_sample_method", "matching"
"""The key that names the verifier, and the one by the target's own draws, which it is where the user names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """What a drafter knows of the target when it is built."""

    vocab_size: int  # token ids are below this
    max_model_len: int  # no sequence has more tokens
    num_speculative_tokens: int  # the most nodes any draft may have
    max_num_seqs: int = 1  # the most sequences in a step
    max_num_batched_tokens: int = 2048  # the most tokens that the target reads in a step
    block_size: int = 16  # KV places in a block
    loaded: LoadedTarget | None = None  # None only where a drafter is built without an engine

    @property
    def itself(self) -> LoadedTarget:
        """The loaded target, for drafters that share its parts."""
        assert self.loaded is not None, "the engine builds drafters with a loaded target"
        return self.loaded


class DrafterConfig(Protocol):
    """A drafter's own settings: a frozen dataclass whose field names are the user's keys.

    Its `__post_init__` raises `ConfigError` for a value out of range.
    """

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """The number of draft tokens where the user gives none, or None if the user must give it."""
        ...

    def build(self, target: TargetInfo) -> Drafter:
        """Make the drafter."""
        ...


@runtime_checkable
class RunsOnRanks(Protocol):
    """Settings of a drafter that several processes may compute."""

    draft_tensor_parallel_size: int


class DrafterResolver(Protocol):
    """Resolves a user's keys into drafters' settings, for settings that hold those of other drafters."""

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens that any draft may have."""
        ...

    @property
    def shared_keys(self) -> tuple[str, ...]:
        """The keys of `speculative_config` that hold for all drafters together."""
        ...

    def read_keys(self, given: Any) -> dict[str, Any]:
        """The user's keys in today's spelling.

        Raises:
            ConfigError: `given` is no dict, or holds a key that is no longer one.
        """
        ...

    def resolve(self, keys: Mapping[str, Any], *, other_keys: tuple[str, ...]) -> tuple[str, DrafterConfig]:
        """The method's name and its settings; keys in `other_keys` are the caller's.

        Raises:
            ConfigError: there is no such method, a key is unknown, or a value is out of range.
        """
        ...


@runtime_checkable
class ResolvesKeys(Protocol):
    """A class of settings that makes itself from the user's keys, as it may hold other drafters' settings."""

    @classmethod
    def from_keys(cls, keys: Mapping[str, Any], resolver: DrafterResolver) -> DrafterConfig:
        """Make the settings from those of the user's `keys` that are its fields.

        Raises:
            ConfigError: a value is out of range.
        """
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether a method is used for a target, and why; `num_bytes` of memory that a drafter with weights would take."""

    method: str
    is_used: bool
    why: str
    num_bytes: int = 0


@runtime_checkable
class ChoosesDrafters(Protocol):
    """Settings of a method that chooses drafters by itself."""

    def choices(self, target: TargetInfo) -> list[Choice]:
        """What is used for a target, what not, and why."""
        ...


@runtime_checkable
class BuildsWithHead(Protocol):
    """Settings of a method that drafts with a trained head, which another of the same features can take the place of."""

    def check_has_head(self, drafter: Drafter) -> None:
        """Look whether the drafter in use, built from these settings, has a head: else nothing is kept that one could read.

        Raises:
            ConfigError: it has none.
        """
        ...

    def build_with_head(self, folder: Path, target: TargetInfo, *, before: Drafter) -> Drafter:
        """Make the drafter with the head in `folder`; what the one `before` has learnt of texts is taken over.

        Raises:
            ConfigError: settings and head do not fit.
            ModelError: the head cannot be loaded or was not made for this target.
        """
        ...


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence that may get a draft of at most `max_tokens` nodes, at most `max_depth` deep.

    A drafter that knows how likely its nodes are to stand may leave out those with less chance than
    `min_survival`: they would hardly be verified.

    The target's KV of its first `num_computed` tokens lies in the blocks `block_ids` (a view that is
    valid during the call). That is all of them but the last committed token. `rules` are its sampling
    rules; a request without rules is greedy. `early_stop` says where a chain ends, where it is not to be as long as it may.
    """

    sequence: Sequence
    max_tokens: int
    max_depth: int
    num_computed: int = 0
    block_ids: npt.NDArray[np.int32] = field(default_factory=NO_BLOCKS.view)
    rules: SamplingRules | None = None
    min_survival: float = 0.0
    early_stop: EarlyStop | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftContext:
    """The input of a drafting step: the sequences to draft for, and the hidden states that the drafter needs.

    `features` maps each name in the drafter's `needs` to [num_slots, width]: the target's hidden state
    of each token, at the slot (block id * block size + offset) of the token's place. Those of a
    request's first `num_computed` tokens are there, wherever the tokens were computed: in an earlier
    step, in a chunk of the prompt, or for another request and found in the prefix cache.
    """

    requests: Listing[DraftRequest]
    features: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class ExportsHiddenStates(Protocol):
    """Settings of a method whose hidden states are saved to a file when a sequence ends."""

    @property
    def exported(self) -> tuple[str, ...]:
        """The names of the hidden states (as in `Drafter.needs`), in their order in the file."""
        ...


class Drafter(Protocol):
    """Drafts the next tokens of sequences. Its drafts may be wrong or missing; the output stays exact.

    `needs` names the hidden states of the target that are kept for it: "last_hidden", after the final
    norm, or "hidden.N", the residual stream before layer N. Most drafters need none.
    """

    needs: frozenset[str]

    def start(self, sequence: Sequence) -> None:
        """Take in a new sequence after its first step; it has a prompt, and perhaps its first tokens."""
        ...

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return one draft per request, in their order; `NO_DRAFT` where no draft is worth verifying.

        A sequence may have been left out of any number of steps since the last call: catch up from its
        committed tokens. A draft over the request's limits is cut.
        """
        ...

    def stop(self, sequence: Sequence) -> None:
        """Forget a sequence that has finished or was aborted; its tokens are final."""
        ...


@runtime_checkable
class KeepsKV(Protocol):
    """A drafter with KV: entries of its own for each of the target's blocks, or in the target's own layers.

    Its entries of a text lie in blocks with the ids of the target's, so that a block found in the
    prefix cache serves both. What a draft writes beyond the committed text goes to scratch blocks,
    which no sequence ever holds: those of the cache that it writes to, its own or the target's.
    """

    kv_bytes_per_block: int  # of its own entries for one of the target's blocks; 0 where it uses the target's
    scratch_bytes: int  # of scratch blocks of its own
    num_scratch_blocks: int  # of the target's cache; 0 where drafts are not written there

    def use_kv(self, target_cache: KVCache, *, num_blocks: int) -> None:
        """Allocate the memory, once and before the first sequence; scratch blocks follow the sequences' `num_blocks`."""
        ...


@runtime_checkable
class ReadsTexts(Protocol):
    """A drafter that knows how much of a text it has yet to read before it drafts: what it costs to ask it again."""

    def num_unread(self, request: DraftRequest) -> int:
        """How many of the request's first `num_computed` tokens that are; 0 where nothing is read for it."""
        ...


class BlockKV(Protocol):
    """A drafter's own entries in the target's blocks."""

    @property
    def cache(self) -> KVCache:
        """Where they lie, under the ids of the target's blocks."""
        ...

    def holds(self, block: int, digest: bytes) -> bool:
        """Whether a block has the entries of the text with this digest (see `prefix_cache.block_digests`)."""
        ...

    def note_block(self, block: int, digest: bytes) -> None:
        """Note that the entries of that text have been put into a block."""
        ...


@runtime_checkable
class MovesKV(Protocol):
    """A drafter whose own KV goes to another engine with the target's; others make theirs anew there."""

    @property
    def moved_kv(self) -> Listing[BlockKV]:
        """What goes, in the same order in each engine with this drafter; after `use_kv`."""
        ...


def computes_with_a_model(drafter: Drafter) -> bool:
    """Whether a drafter reads hidden states or KV, so that it drafts only where the target has read the text."""
    keeps_kv = isinstance(drafter, KeepsKV) and bool(drafter.kv_bytes_per_block or drafter.num_scratch_blocks)
    return bool(drafter.needs) or keeps_kv


class VerifiedRows:
    """What the target found at a step's rows with logits: R rows, those of a sequence side by side.

    A row's token is a committed token or a drafted one; rows of drafted tokens that did not stand are
    included, since what the target says after them is as true as elsewhere. The candidates are the
    target's likeliest next tokens, by their raw logits: before any sampling rule, so also for
    requests with penalties, masks or a temperature.
    """

    def __init__(
        self,
        *,
        token_ids: HostArray,
        previous_ids: HostArray,
        candidate_ids: HostArray,
        candidate_logits: HostArray,
        salts: Listing[tuple[int, int, str | None]],
    ) -> None:
        """`salts` are (first row, row behind the last, cache salt) of each sequence; see the properties for the rest."""
        self.salts = salts
        self.numbers = (token_ids, previous_ids, candidate_ids, candidate_logits)  # as they were given

    def __len__(self) -> int:
        return len(self.numbers[0])

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """[R] the row's own token"""
        return as_numpy(self.numbers[0], np.int64, num_rows=len(self)).ravel()

    @property
    def previous_ids(self) -> npt.NDArray[np.int64]:
        """[R] the token before it in its text or its draft's path; -1: there is none"""
        return as_numpy(self.numbers[1], np.int64, num_rows=len(self)).ravel()

    @property
    def candidate_ids(self) -> npt.NDArray[np.int32]:
        """[R, k], likeliest first"""
        return as_numpy(self.numbers[2], np.int32, num_rows=len(self))

    @property
    def candidate_logits(self) -> npt.NDArray[np.float32]:
        """[R, k], falling"""
        return as_numpy(self.numbers[3], np.float32, num_rows=len(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramLookup:
    """A draft that copies what followed the latest occurrence of the text's longest suffix that occurred before.

    Suffixes of `shortest` to `longest` tokens, 32 at most, are looked up. Entry i of `draft_lengths` is how many tokens are
    copied where i + 1 tokens match; a longer match counts like the last entry's.
    """

    shortest: int
    longest: int
    draft_lengths: tuple[int, ...]


@runtime_checkable
class LooksUpNgrams(Protocol):
    """A drafter whose drafts are what `ngram_lookup` says and nothing else, so that a device with the texts can draft in its place."""

    @property
    def ngram_lookup(self) -> NgramLookup:
        """What it looks up, and how much it copies."""
        ...


@runtime_checkable
class LearnsFromTarget(Protocol):
    """A drafter that learns from what the target finds at each step's rows.

    `num_candidates` is how many of each row's likeliest next tokens it needs, 16 at most; of 0, `learn`
    is not called. `learn` is called after a step is verified and before the drafts that follow it. What
    it raises costs drafts, never text.
    """

    num_candidates: int

    def learn(self, rows: VerifiedRows) -> None:
        """Take in the rows of a step; `rows` may have more candidates than `num_candidates`."""
        ...


PoolArrays = Mapping[str, npt.NDArray[Any]]
"""What a pool keeps of one cache salt: flat arrays by name."""


class Pool(Protocol):
    """What a drafter remembers of past requests, apart for each cache salt; it can be saved and loaded."""

    def to_arrays(self) -> Mapping[str | None, PoolArrays]:
        """Copy all that is kept, by salt; the salt used for longest ago first."""
        ...

    def from_arrays(self, saved: Mapping[str | None, PoolArrays]) -> None:
        """Take in what `to_arrays` gave, within the pool's own limits.

        Raises:
            ValueError: it is not what a pool of this kind and vocabulary gives. The pool has not changed.
            KeyError: an array is missing. The pool has not changed.
        """
        ...


@runtime_checkable
class GoesByClock(Protocol):
    """A drafter whose drafts depend on how long drafts and steps take."""

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Go by this clock, in seconds, from now on."""
        ...


@runtime_checkable
class KeepsPools(Protocol):
    """A drafter that remembers past requests, so that saving its pools keeps a restarted server warm."""

    @property
    def pools(self) -> Mapping[str, Pool]:
        """The pools by kind; a kind says what its arrays mean, whichever drafter keeps it."""
        ...


@dataclass(frozen=True, slots=True)
class NoDrafterConfig:
    """The settings of `NoDrafter`, of which there are none; the default, so that plain decoding needs no branch."""

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """Zero: there are no drafts."""
        return 0

    def build(self, target: TargetInfo) -> Drafter:  # noqa: ARG002 - the signature is that of all drafters
        """Make the drafter."""
        return NoDrafter()


class NoDrafter:
    """Drafts nothing; `needs` names hidden states of the target that are kept for another reader."""

    def __init__(self, needs: frozenset[str] = frozenset()) -> None:
        self.needs = needs

    def start(self, sequence: Sequence) -> None:
        """Do nothing: no state is kept."""

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return an empty draft for each request."""
        return [NO_DRAFT] * len(context.requests)

    def stop(self, sequence: Sequence) -> None:
        """Do nothing: no state was kept."""
