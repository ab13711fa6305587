"""Several drafters in order of preference: copying where the text repeats itself, a model where it does not.

SuffixDecoding (arXiv 2411.04975) falls back to a model where its own draft promises little; here the
list may hold any drafters, and the length of a draft says how much it promises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Listing
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.integers import check_integer
from forerun.core.sequence import Sequence
from forerun.drafters.base import (
    MATCHING,
    VERIFIER,
    BlockKV,
    DraftContext,
    Drafter,
    DrafterConfig,
    DrafterResolver,
    DraftRequest,
    ExportsHiddenStates,
    KeepsKV,
    KeepsPools,
    MovesKV,
    Pool,
    TargetInfo,
    VerifiedRows,
)
from forerun.drafters.guard import GuardedDrafter
from forerun.errors import ConfigError, ForerunError, UnknownKeyError

if TYPE_CHECKING:
    from forerun.kv.cache import KVCache

DEFAULT_MIN_DRAFT_TOKENS = 2
"""Of a copy that long about one token is expected to be accepted: what a small model's draft gains once its passes are paid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """The settings of one of the drafters, and its limits.

    It drafts at most `num_speculative_tokens`. A draft that is `min_draft_tokens` deep, as deep as
    its request allows, or drawn with known odds, is good enough, so that no later drafter is asked.
    """

    method: str
    drafter: DrafterConfig
    num_speculative_tokens: int
    min_draft_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """The drafters, most preferred first; the last is asked where none before it has a draft that is good enough.

    `rejection_sample_method` is the verifier's, which those of them are told that pick their tokens by it.

    Raises:
        ConfigError: there are fewer than two.
    """

    drafters: tuple[MemberConfig, ...] = ()
    rejection_sample_method: str = MATCHING

    def __post_init__(self) -> None:
        if len(self.drafters) < 2:
            raise ConfigError(
                f"speculative_config: drafters: got {len(self.drafters)}; must be two or more dicts such as "
                "{'method': 'suffix'}, the most preferred first; for one alone write its keys in their place"
            )

    @classmethod
    def from_keys(cls, keys: Mapping[str, Any], resolver: DrafterResolver) -> HybridConfig:
        """Resolve the dicts under "drafters": each is a small `speculative_config`.

        Raises:
            ConfigError: the value is no list, or one of the dicts is wrong; the error says which.
        """
        given = keys.get("drafters", ())
        if not isinstance(given, (list, tuple)):
            raise ConfigError(f"speculative_config: drafters: got {given!r}; must be a list of dicts, one per drafter")
        verifier, members = keys.get(VERIFIER, MATCHING), []
        for number, member in enumerate(given):
            with _naming_member(number):
                members.append(_resolve_member(member, resolver, verifier, is_last=number == len(given) - 1))
        return cls(drafters=tuple(members), rejection_sample_method=verifier)

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """None, as the user must give the number of tokens."""
        return None

    @property
    def names(self) -> list[str]:
        """What statistics call each drafter: its method, and where several have the same its place in the list."""
        uses = Counter(member.method for member in self.drafters)
        return [
            member.method if uses[member.method] == 1 else f"{member.method}[{number}]"
            for number, member in enumerate(self.drafters)
        ]

    def build(self, target: TargetInfo) -> Drafter:
        """Make the drafters, all for the same target.

        Raises:
            ForerunError: one of them cannot be made; the error says which.
        """
        members = []
        for number, (name, config) in enumerate(zip(self.names, self.drafters, strict=True)):
            max_tokens = config.num_speculative_tokens
            with _naming_member(number):
                drafter = config.drafter.build(replace(target, num_speculative_tokens=max_tokens))
            guarded = GuardedDrafter(drafter, vocab_size=target.vocab_size)
            members.append(Member(name, guarded, max_tokens=max_tokens, min_draft_tokens=config.min_draft_tokens))
        return Hybrid(members)


@contextmanager
def _naming_member(number: int) -> Iterator[None]:
    """Let an error say which drafter of the list it is about."""
    try:
        yield
    except ForerunError as error:
        what = str(error).removeprefix("speculative_config: ")
        raise type(error)(f"speculative_config: drafters[{number}]: {what}") from error


def _resolve_member(given: Any, resolver: DrafterResolver, verifier: str, *, is_last: bool) -> MemberConfig:
    keys = resolver.read_keys(given)
    for key in resolver.shared_keys:
        if key in keys:
            raise UnknownKeyError(f"{key!r} is for all drafters together; write it beside 'drafters'")
    if "drafters" in keys or keys.get("method") == "hybrid":
        raise ConfigError("a hybrid cannot be part of another; write its drafters into the outer list")
    if is_last and "min_draft_tokens" in keys:
        raise ConfigError("min_draft_tokens: the last drafter's drafts are taken whatever their length; leave it out")
    method, drafter = resolver.resolve(
        keys | {VERIFIER: verifier}, other_keys=("num_speculative_tokens", "min_draft_tokens", VERIFIER)
    )
    if isinstance(drafter, ExportsHiddenStates):
        raise ConfigError(f"{method!r} drafts nothing, and as part of a hybrid saves nothing; make it the only method")
    most = resolver.max_draft_tokens
    num_tokens = _integer(keys, "num_speculative_tokens", most=most, default=most)
    # any draft of the last is good enough; with room for fewer tokens than the default, so many are
    default = 1 if is_last else min(DEFAULT_MIN_DRAFT_TOKENS, num_tokens)
    return MemberConfig(
        method=method,
        drafter=drafter,
        num_speculative_tokens=num_tokens,
        min_draft_tokens=_integer(keys, "min_draft_tokens", most=num_tokens, default=default),
    )


def _integer(keys: Mapping[str, Any], name: str, *, most: int, default: int) -> int:
    value: int = keys.get(name, default)
    check_integer(name, value, least=1, most=most, do=f"leave it out for {default}")
    return value


@dataclass(frozen=True, slots=True)
class Member:
    """One of the drafters behind its guard, with its name in statistics and its limits."""

    name: str
    guarded: GuardedDrafter
    max_tokens: int
    min_draft_tokens: int

    def propose(self, requests: Listing[DraftRequest], context: DraftContext) -> list[Draft]:
        """Draft for some of the step's requests; each draft names its source."""
        return [
            replace(draft, source=self.name, sources=None) if draft.token_ids else NO_DRAFT
            for draft in self.guarded.propose([self._within_limits(one) for one in requests], context.features)
        ]

    def is_good_enough(self, draft: Draft, request: DraftRequest) -> bool:
        """Whether `draft` is deep enough, or as deep as `request` allows; one drawn with known odds always is.

        How deep that one is may depend on what was drawn, and verifying it is exact only if whether it is verified does not.
        """
        enough = min(self.min_draft_tokens, request.max_tokens, request.max_depth)
        return draft.probs is not None or draft.depth >= enough

    def _within_limits(self, request: DraftRequest) -> DraftRequest:
        if request.max_tokens <= self.max_tokens:
            return request
        return replace(request, max_tokens=self.max_tokens, max_depth=min(request.max_depth, self.max_tokens))


class Hybrid:
    """Asks its drafters one after the other, each for the sequences that have no draft that is good enough.

    So a model computes nothing for a sequence that copies; when it is asked again it catches up. Where
    no draft is good enough the last drafter's is taken, and where that is empty the first one that is
    not. A drafter that fails gives empty drafts.

    Drafters that write to the target's cache use the same scratch blocks there: each has finished its drafts
    before the next one starts, and none reads there what another has written.
    """

    def __init__(self, members: Listing[Member]) -> None:
        drafters = [member.guarded.drafter for member in members]
        self.needs: frozenset[str] = frozenset().union(*(drafter.needs for drafter in drafters))
        self.num_candidates = max(member.guarded.num_candidates for member in members)
        self._members = members
        self._keepers = [drafter for drafter in drafters if isinstance(drafter, KeepsKV)]
        self.kv_bytes_per_block = sum(keeper.kv_bytes_per_block for keeper in self._keepers)
        self.scratch_bytes = sum(keeper.scratch_bytes for keeper in self._keepers)
        self.num_scratch_blocks = max((keeper.num_scratch_blocks for keeper in self._keepers), default=0)

    @property
    def num_member_failures(self) -> int:
        """The number of failures that the drafters' guards have caught."""
        return sum(member.guarded.num_failures for member in self._members)

    @property
    def pools(self) -> Mapping[str, Pool]:
        """The pools of all drafters; of several of one kind the first one's."""
        keepers = [one.guarded.drafter for one in self._members if isinstance(one.guarded.drafter, KeepsPools)]
        return {kind: pool for keeper in reversed(keepers) for kind, pool in keeper.pools.items()}

    def use_kv(self, target_cache: KVCache, *, num_blocks: int) -> None:
        """Let each drafter with KV take its memory."""
        for keeper in self._keepers:
            keeper.use_kv(target_cache, num_blocks=num_blocks)

    @property
    def moved_kv(self) -> Listing[BlockKV]:
        """That of all drafters."""
        return [own for keeper in self._keepers if isinstance(keeper, MovesKV) for own in keeper.moved_kv]

    def learn(self, rows: VerifiedRows) -> None:
        """Let each drafter that learns from the target do so."""
        for member in self._members:
            member.guarded.learn(rows)

    def start(self, sequence: Sequence) -> None:
        """Start the sequence in all drafters."""
        for member in self._members:
            member.guarded.start(sequence)

    def propose(self, context: DraftContext) -> list[Draft]:
        """Return for each request the first draft that is good enough."""
        requests = context.requests
        chosen = [NO_DRAFT] * len(requests)
        undecided = list(range(len(requests)))
        for member in self._members:
            drafts = member.propose([requests[i] for i in undecided], context)
            asked, undecided = undecided, []
            for i, draft in zip(asked, drafts, strict=True):
                good = member.is_good_enough(draft, requests[i])
                if good or not chosen[i].token_ids:
                    chosen[i] = draft
                if not good:
                    undecided.append(i)
        return chosen

    def stop(self, sequence: Sequence) -> None:
        """Stop the sequence in all drafters."""
        for member in self._members:
            member.guarded.stop(sequence)
