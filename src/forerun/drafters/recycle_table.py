"""A table of what the target once held likely after a token, and after two: Token Recycling (arXiv 2408.08696).

The paper keeps the candidates of single tokens; those of two tokens are right far more often, where they
are known, and single tokens are what is left where they are not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Listing
from ctypes import addressof
from functools import lru_cache, partial
from itertools import groupby
from math import exp
from operator import itemgetter
from struct import Struct
from sys import getsizeof
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from forerun.core.sampling_params import GREEDY_BELOW
from forerun.drafters.base import PoolArrays, VerifiedRows
from forerun.ops.native.library import best_kernels
from forerun.ops.native.lookup import NativeRows
from forerun.ops.native.structs import ContextTableStruct, SaltContextsStruct

NUM_CANDIDATES = 8
"""The next tokens that are kept of each context."""

GAP_STEPS = 16
"""Steps per nat of a candidate's gap: how far its logit lies below the first one's. A byte holds gaps up to 15.9."""

FEWEST_SLOTS = 256
FILLED = 1 / 4
"""A table of two-token contexts doubles when this part of its slots is taken: one in eight contexts has lost its slot by then."""
OBJECTS_OF_A_SALT = 4096  # bytes, measured and rounded up
LARGEST_SHARE = 0.8
"""The part of the budget that the contexts of one salt may take, so that other salts do not cost it all it knows."""

ALL_BITS = (1 << 64) - 1
HASH_SHIFT = 38
"""The bits of the product below the slot's number."""
SCATTERING = 0x9E3779B97F4A7C15  # 2^64 / golden ratio (Fibonacci hashing; Knuth, volume 3, 6.4)
IN_ORDER = 1 << HASH_SHIFT  # the slot's number is the key itself


Records = npt.NDArray[np.void]
"""Fields: key, token_ids [k] and gaps [k]; a key of 0 marks an empty slot."""


def record_type(num_candidates: int) -> np.dtype[np.void]:
    """The layout of a slot."""
    return np.dtype(
        [("key", np.uint64), ("token_ids", np.int32, (num_candidates,)), ("gaps", np.uint8, (num_candidates,))]
    )


class Found(NamedTuple):
    """The candidates of a context: how many of its tokens were known (2 or 1), token ids, likeliest first, and gaps."""

    context_length: int
    token_ids: tuple[int, ...]
    gaps: tuple[int, ...]  # how far each one's logit was below the first one's, in nats / `GAP_STEPS`, at most 255

    def probabilities(self, temperature: float = 1.0) -> list[float]:
        """The candidates' chances among themselves, as the target saw them then; a greedy temperature counts as 1."""
        weights = _weights(1.0 if temperature < GREEDY_BELOW else temperature)
        mine = [weights[gap] for gap in self.gaps]
        total = sum(mine)
        return [weight / total for weight in mine]


@lru_cache(maxsize=64)
def _weights(temperature: float) -> list[float]:
    """The weight of each gap in the softmax at a temperature; the first candidate's is 1."""
    return [exp(-gap / (GAP_STEPS * temperature)) for gap in range(256)]


GAP_WEIGHTS = _weights(1.0)
"""The weight of each gap at temperature 1."""


class ContextTable:
    """Key -> candidates: a direct-mapped hash table in one flat array, in which the newest of a slot stays.

    A key is above 0 and below 2^64 and kept whole, so that no context is ever taken for another. Memory
    is that of the slots alone; `double` adds as many again.
    """

    def __init__(self, num_slots: int, *, num_candidates: int, multiplier: int) -> None:
        self.num_used = 0
        self.slots = np.zeros(num_slots, record_type(num_candidates))
        self._multiplier = multiplier
        self._ids = slice(1, 1 + num_candidates)
        self._gaps = slice(1 + num_candidates, 1 + 2 * num_candidates)
        self._num_bytes_of_slot = self.slots.itemsize
        self.struct = ContextTableStruct(
            slots=self.slots.ctypes.data, num_slots=num_slots, multiplier=multiplier, num_candidates=num_candidates
        )
        # of one record NumPy would take three times as long to make Python's numbers
        self._read: Callable[[Any, int], tuple[int, ...]] = Struct(f"=Q{num_candidates}i{num_candidates}B").unpack_from

    @property
    def num_bytes(self) -> int:
        """The memory of the slots."""
        return self.slots.nbytes

    def find(self, key: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Token ids and gaps of a key's candidates."""
        slot = (key * self._multiplier & ALL_BITS) >> HASH_SHIFT & len(self.slots) - 1
        record = self._read(self.slots, slot * self._num_bytes_of_slot)
        return (record[self._ids], record[self._gaps]) if record[0] == key else None

    def store(self, records: Records) -> None:
        """Store the candidates of many keys; of several in one slot the last stays."""
        places = self._places(records["key"])
        was_empty = self.slots["key"][places] == 0
        if was_empty.any():
            self.num_used += len(set(places[was_empty].tolist()))
        self.slots[places] = records

    def used(self) -> Records:
        """A copy of all that is stored."""
        used: Records = self.slots[self.slots["key"] != 0]
        return used

    def double(self) -> None:
        """Make twice as many slots, in place: each key stays, or moves up by the old number of slots."""
        old = len(self.slots)
        self.slots.resize(2 * old, refcheck=False)  # nobody keeps a view of it
        for start in range(0, old, FEWEST_SLOTS):
            some = self.slots[start : start + FEWEST_SLOTS]
            moving = start + np.flatnonzero(self._places(some["key"]) >= old)
            self.slots[moving + old] = self.slots[moving]
            self.slots["key"][moving] = 0
        self.struct.slots, self.struct.num_slots = self.slots.ctypes.data, len(self.slots)

    def _places(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """The one slot where each key may be."""
        return (keys * np.uint64(self._multiplier) >> np.uint64(HASH_SHIFT)).astype(np.int64) & len(self.slots) - 1


class SaltContexts:
    """What was learnt from sequences of one salt: the candidates of one-token and of two-token contexts."""

    def __init__(self, salt: str | None, *, num_candidates: int) -> None:
        self._num_bytes_besides = OBJECTS_OF_A_SALT + getsizeof(salt)
        self.ones = ContextTable(FEWEST_SLOTS, num_candidates=num_candidates, multiplier=IN_ORDER)
        self.twos = ContextTable(FEWEST_SLOTS, num_candidates=num_candidates, multiplier=SCATTERING)
        self.struct = SaltContextsStruct(ones=addressof(self.ones.struct), twos=addressof(self.twos.struct))

    @property
    def num_bytes(self) -> int:
        """The memory of both tables and of what holds them."""
        return self.ones.num_bytes + self.twos.num_bytes + self._num_bytes_besides

    def look_up(self, previous_id: int, token_id: int) -> Found | None:
        """The candidates after two tokens, else after `token_id` alone; None where neither is known."""
        if previous_id >= 0:
            found = self.twos.find((previous_id << 32) + token_id + 1)
            if found is not None:
                return Found(2, *found)
        found = self.ones.find(token_id + 1)
        return None if found is None else Found(1, *found)


class RowsToStore(Protocol):
    """A step's rows, ready to be stored."""

    def store(self, contexts: SaltContexts, first: int, end: int) -> None:
        """Store rows [first, end) under their tokens, and under the last two of them where there are two."""
        ...


class PlainRows:
    """The rows as records; `ops.native.lookup.NativeRows` is the compiled twin."""

    def __init__(self, rows: VerifiedRows, num_candidates: int) -> None:
        self._ones = np.empty(len(rows), record_type(num_candidates))
        self._ones["key"] = rows.token_ids + 1
        self._ones["token_ids"] = rows.candidate_ids[:, :num_candidates]
        self._ones["gaps"] = quantise(rows.candidate_logits[:, :num_candidates])
        self._twos = self._ones.copy()
        self._twos["key"] += rows.previous_ids.astype(np.uint64) << np.uint64(32)
        self._has_two = rows.previous_ids >= 0

    def store(self, contexts: SaltContexts, first: int, end: int) -> None:
        """See `RowsToStore`."""
        contexts.ones.store(self._ones[first:end])
        known = self._has_two[first:end]
        contexts.twos.store(self._twos[first:end] if known.all() else self._twos[first:end][known])


class RecycleTable:
    """The target's candidates after the last two tokens of a text, or after its last one.

    Sequences with different cache salts share nothing. All salts together take at most `max_bytes`: a
    salt's tables begin small and double while there is room, those of the salt that was learnt for
    longest ago make room for others, and a full table forgets a context for each that it learns.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_bytes: int,
        num_candidates: int = NUM_CANDIDATES,
        to_store: Callable[[VerifiedRows, int], RowsToStore] | None = None,
    ) -> None:
        """`to_store` makes rows ready with so many candidates: `PlainRows` or its compiled twin; None takes the best there is."""
        kernels = best_kernels() if to_store is None else None
        self._to_store = to_store or (PlainRows if kernels is None else partial(NativeRows, kernels))
        self.num_candidates = min(num_candidates, vocab_size)
        self.num_bytes = 0
        self.max_bytes = max_bytes
        self._vocab_size = vocab_size
        self._most_ones = 1 << (vocab_size - 1).bit_length()
        self._salts: OrderedDict[str | None, SaltContexts] = OrderedDict()  # the one learnt for last comes last

    def look_up(self, previous_id: int, token_id: int, salt: str | None) -> Found | None:
        """The candidates after two tokens, else after `token_id` alone; None where neither is known.

        Args:
            previous_id: the token before; -1: there is none.
            token_id: the token whose successor is wanted.
            salt: the sequence's cache salt.
        """
        contexts = self._salts.get(salt)
        return None if contexts is None else contexts.look_up(previous_id, token_id)

    def of(self, salt: str | None) -> SaltContexts | None:
        """What was learnt from sequences of a salt, or None where nothing was."""
        return self._salts.get(salt)

    def learn(self, rows: VerifiedRows) -> None:
        """Keep the candidates of a step's rows under their contexts; what was known of a context is replaced."""
        if not len(rows):
            return
        stored = self._to_store(rows, self.num_candidates)
        for first, end, salt in rows.salts if len(rows.salts) == 1 else _runs(rows.salts):
            contexts = self._contexts(salt)
            if contexts is not None:
                stored.store(contexts, first, end)
                self._grow(contexts)

    def to_arrays(self) -> dict[str | None, PoolArrays]:
        """Each salt's contexts of one token and of two, with the candidates and gaps of each.

        The arrays are `ones` [n], `ones_candidates` [n, k], `ones_gaps` [n, k], `twos` [m, 2] and so on.
        """
        return {
            salt: _unpacked("ones", contexts.ones.used()) | _unpacked("twos", contexts.twos.used())
            for salt, contexts in self._salts.items()
        }

    def from_arrays(self, saved: Mapping[str | None, PoolArrays]) -> None:
        """Add the contexts of `to_arrays`.

        Raises:
            ValueError: the arrays are none that `to_arrays` gives for this vocabulary.
        """
        records = {salt: (self._packed("ones", arrays), self._packed("twos", arrays)) for salt, arrays in saved.items()}
        for salt, (ones, twos) in records.items():
            contexts = self._contexts(salt)
            if contexts is not None:
                self._grow(contexts, more_ones=len(ones), more_twos=len(twos))
                contexts.ones.store(ones)
                contexts.twos.store(twos)

    def _packed(self, name: str, arrays: PoolArrays) -> Records:
        """Records of the arrays of one kind of context."""
        contexts = arrays[name]
        token_ids, gaps = (arrays[f"{name}_{what}"][..., : self.num_candidates] for what in ("candidates", "gaps"))
        shape = (len(contexts), self.num_candidates)
        if token_ids.shape != shape or gaps.shape != shape or contexts.shape != shape[:1] + (2,) * (name == "twos"):
            raise ValueError(f"{name}: contexts {contexts.shape}, candidates {token_ids.shape}, gaps {gaps.shape}")
        if contexts.dtype != np.int32 or token_ids.dtype != np.int32 or gaps.dtype != np.uint8:
            raise ValueError(f"{name}: contexts {contexts.dtype}, candidates {token_ids.dtype}, gaps {gaps.dtype}")
        for tokens in (contexts, token_ids):
            if ((tokens < 0) | (tokens >= self._vocab_size)).any():
                raise ValueError(f"{name}: token ids are not all from 0 to {self._vocab_size - 1}")
        records = np.empty(len(contexts), record_type(self.num_candidates))
        records["key"] = contexts if name == "ones" else contexts @ np.array([1 << 32, 1])
        records["key"] += np.uint64(1)
        records["token_ids"], records["gaps"] = token_ids, gaps
        return records

    def _contexts(self, salt: str | None) -> SaltContexts | None:
        """The tables of a salt, new ones if need be; None where the budget allows none."""
        contexts = self._salts.get(salt)
        if contexts is None:
            contexts = SaltContexts(salt, num_candidates=self.num_candidates)
            if not self._make_room(contexts.num_bytes, keep=None):
                return None
            self._salts[salt] = contexts
            self.num_bytes += contexts.num_bytes
        self._salts.move_to_end(salt)
        return contexts

    def _grow(self, contexts: SaltContexts, *, more_ones: int = 0, more_twos: int = 0) -> None:
        """Double the tables of the salt learnt for last while they are filled, or will be, and the budget lasts."""
        ones, twos = contexts.ones, contexts.twos
        while len(ones.slots) < min(self._most_ones, 2 * (ones.num_used + more_ones)) and self._double(ones, contexts):
            pass
        while len(twos.slots) * FILLED < twos.num_used + more_twos and self._double(twos, contexts):
            pass

    def _double(self, table: ContextTable, contexts: SaltContexts) -> bool:
        """Double a table if the budget allows it; whether it does."""
        more = table.num_bytes
        if contexts.num_bytes + more > LARGEST_SHARE * self.max_bytes or not self._make_room(more, keep=contexts):
            return False
        table.double()
        self.num_bytes += more
        return True

    def _make_room(self, num_bytes: int, *, keep: SaltContexts | None) -> bool:
        """Forget other salts, that learnt for longest ago first, until `num_bytes` more fit; whether they do.

        What never fits costs nobody.
        """
        if num_bytes > self.max_bytes:
            return False
        while self.num_bytes + num_bytes > self.max_bytes:
            salt, oldest = next(iter(self._salts.items()))
            if oldest is keep:
                return False
            del self._salts[salt]
            self.num_bytes -= oldest.num_bytes
        return True


def quantise(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The gap of each logit to the first of its row, [R, k]; one too far away, or no number, has the largest."""
    gaps: npt.NDArray[np.float32] = np.fmin((logits[:, :1] - logits) * GAP_STEPS, 255.0)
    return np.rint(gaps).astype(np.uint8)


def _unpacked(name: str, records: Records) -> dict[str, npt.NDArray[Any]]:
    """The arrays of `RecycleTable.to_arrays` for one kind of context."""
    keys = records["key"] - np.uint64(1)
    last = (keys & np.uint64((1 << 32) - 1)).astype(np.int32)
    contexts = last if name == "ones" else np.stack([(keys >> np.uint64(32)).astype(np.int32), last], axis=1)
    return {
        name: contexts,
        f"{name}_candidates": np.ascontiguousarray(records["token_ids"]),
        f"{name}_gaps": np.ascontiguousarray(records["gaps"]),
    }


def _runs(salts: Listing[tuple[int, int, str | None]]) -> Iterator[tuple[int, int, str | None]]:
    """Neighbours of one salt joined, so that a step of equal salts is learnt at once."""
    for salt, group in groupby(salts, key=itemgetter(2)):
        members = list(group)
        yield members[0][0], members[-1][1], salt
