"""Token recycling (arXiv 2408.08696): draft what the target held likely when it last met these tokens.

Each row that the target computes leaves its likeliest next tokens in a table, and rejected draft tokens'
rows do so too; drafts grow from the table. Nothing is loaded and nothing trained.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.integers import check_integer
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, DraftRequest, Pool, TargetInfo, VerifiedRows
from forerun.drafters.confidence import check_threshold
from forerun.drafters.recycle_rates import HitRates
from forerun.drafters.recycle_table import Found, RecycleTable
from forerun.errors import ConfigError

DEFAULT_NUM_TOKENS = 7
DEFAULT_MAX_BYTES = 20 << 20
"""Four fifths of it, which one salt may take, are room for 262,144 contexts of two tokens and 65,536 of one."""

DEFAULT_THRESHOLD = 0.05
"""Pays where a drafted row costs a twentieth of a pass (docs/drafters/recycle.md has measurements)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecycleConfig:
    """The table's memory, the shape of drafts, and the least chance of a drafted token.

    The table takes at most `recycle_max_bytes`; 0 keeps nothing, and so drafts nothing. With
    `recycle_tree` a draft is the likeliest tree, else the likeliest chain. Nodes that stand with a chance
    below `draft_confidence_threshold` are left out.

    Raises:
        ConfigError: a value is out of range.
    """

    recycle_max_bytes: int = DEFAULT_MAX_BYTES
    recycle_tree: bool = True
    draft_confidence_threshold: float = DEFAULT_THRESHOLD

    def __post_init__(self) -> None:
        check_integer(
            "recycle_max_bytes",
            self.recycle_max_bytes,
            least=0,
            do=f"it is a number of bytes; leave it out for {DEFAULT_MAX_BYTES}",
        )
        if not isinstance(self.recycle_tree, bool):
            raise ConfigError(f"recycle_tree: got {self.recycle_tree!r}; may be True or False; leave it out for True")
        check_threshold(
            self.draft_confidence_threshold, default=DEFAULT_THRESHOLD, drafted_at_zero="whatever is in the table"
        )

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """Seven: with the row before them eight, up to which rows are cheap on most machines."""
        return DEFAULT_NUM_TOKENS

    def build(self, target: TargetInfo) -> Drafter:
        """Make the drafter."""
        return RecycleDrafter(target, self)


@dataclass(slots=True)
class _Place:
    """A place of a draft whose candidates were looked up, and by token the places behind those that were drafted."""

    token_id: int
    found: Found
    after: dict[int, _Place] = field(default_factory=dict)


class _Node(NamedTuple):
    """A node that a draft may get: a candidate at `place`."""

    token_id: int
    place: _Place
    parent: int
    depth: int


@dataclass(slots=True)
class _State:
    """Of one sequence: the places of its last draft, by which the rates learn what became of them."""

    num_tokens: int = 0
    root: _Place | None = None


class RecycleDrafter:
    """Grows each draft from the table, always by the node that is likeliest to stand.

    A node's chance is its parent's times its own hit rate, so whatever the limits, no other draft of the
    table's candidates is expected to have more tokens accepted.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, target: TargetInfo, config: RecycleConfig) -> None:
        self._table = RecycleTable(vocab_size=target.vocab_size, max_bytes=config.recycle_max_bytes)
        self._rates = HitRates()
        self._threshold = config.draft_confidence_threshold
        self._is_tree = config.recycle_tree
        self._states: dict[int, _State] = {}
        self.num_candidates = self._table.num_candidates

    @property
    def pools(self) -> Mapping[str, Pool]:
        """See `KeepsPools`; none where the table may keep nothing."""
        return {"recycle": self._table} if self._table.max_bytes else {}

    def start(self, sequence: Sequence) -> None:
        """Take in a sequence."""
        self._states[sequence.seq_id] = _State()

    def learn(self, rows: VerifiedRows) -> None:
        """Keep what the target found at a step's rows."""
        self._table.learn(rows)

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return a tree or a chain per request; none where the table does not know the last token."""
        return [self._draft(request) for request in context.requests]

    def stop(self, sequence: Sequence) -> None:
        """Forget the sequence; what was learnt from it stays."""
        self._states.pop(sequence.seq_id, None)

    def _draft(self, request: DraftRequest) -> Draft:
        sequence = request.sequence
        state = self._states[sequence.seq_id]
        if state.root is not None:
            self._count(state.root, sequence.tokens_from(state.num_tokens), sequence.sampling.temperature)
        state.num_tokens = len(sequence)
        *before, token_id = sequence.tokens_from(max(0, len(sequence) - 2))
        state.root = self._place(before[0] if before else -1, token_id, sequence.cache_salt)
        return NO_DRAFT if state.root is None else self._grow(state.root, request)

    def _grow(self, root: _Place, request: DraftRequest) -> Draft:
        """The best draft below `root`."""
        token_ids: list[int] = []
        parents: list[int] = []
        survival: list[float] = []
        salt, temperature = request.sequence.cache_salt, request.sequence.sampling.temperature
        offers: list[tuple[float, int, _Node]] = []  # by chance; of equal chances the first that was offered
        num_offers = 0
        place: _Place | None = root
        chance, parent, depth = 1.0, -1, 0
        while True:
            if place is not None and depth < request.max_depth:
                for rate, token_id in self._likeliest(place.found, temperature):
                    if chance * rate >= self._threshold:
                        num_offers += 1
                        heapq.heappush(offers, (-chance * rate, num_offers, _Node(token_id, place, parent, depth + 1)))
            if not offers or len(token_ids) >= request.max_tokens:
                break
            negative, _, node = heapq.heappop(offers)
            chance, parent, depth = -negative, len(token_ids), node.depth
            token_ids.append(node.token_id)
            parents.append(node.parent)
            survival.append(chance)
            place = self._place(node.place.token_id, node.token_id, salt)
            if place is not None:
                node.place.after[node.token_id] = place
        if not token_ids:
            return NO_DRAFT
        shape = tuple(parents) if self._is_tree else None
        return Draft(tuple(token_ids), shape, source="recycle", survival=tuple(survival))

    def _place(self, previous_id: int, token_id: int, salt: str | None) -> _Place | None:
        """The place behind `token_id`, if the table has candidates for it."""
        found = self._table.look_up(previous_id, token_id, salt)
        return None if found is None else _Place(token_id, found)

    def _likeliest(self, found: Found, temperature: float) -> Iterable[tuple[float, int]]:
        """The candidates that a draft may have, each with its chance: all of them, or for a chain the likeliest."""
        rated = zip(self._rates.chances(found, temperature), found.token_ids, strict=True)
        return rated if self._is_tree else (max(rated, key=itemgetter(0)),)

    def _count(self, place: _Place, token_ids: list[int], temperature: float) -> None:
        """Count, at each place of the last draft that the text came to, which candidate was right."""
        for token_id in token_ids:
            self._rates.count(place.found, temperature, token_id)
            after = place.after.get(token_id)
            if after is None:
                return
            place = after
