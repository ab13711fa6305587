"""Several drafters in order of preference: copying where the text repeats itself, a model where it does not.

SuffixDecoding (arXiv 2411.04975) falls back to a model where its own draft promises little; here the
list may have any drafters, and how much a draft promises is told by its length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace

from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, DraftRequest, KeepsKV, TargetInfo
from forerun.drafters.guard import GuardedDrafter
from forerun.drafters.member import MemberConfig, naming_member
from forerun.errors import ConfigError
from forerun.kv.cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """The drafters, most preferred first; the last is asked where none before it has a draft that is good enough.

    Raises:
        ConfigError: there are fewer than two.
    """

    drafters: tuple[MemberConfig, ...] = ()

    def __post_init__(self) -> None:
        if len(self.drafters) < 2:
            raise ConfigError(
                f"speculative_config: drafters: got {len(self.drafters)}; must be two or more dicts such as "
                "{'method': 'suffix'}, the most preferred first; for one alone write its keys in their place"
            )

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """The user must say how many."""
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
            most = config.num_speculative_tokens
            with naming_member(number):
                drafter = config.drafter.build(replace(target, num_speculative_tokens=most))
            guarded = GuardedDrafter(drafter, vocab_size=target.vocab_size)
            members.append(Member(name, guarded, max_tokens=most, min_draft_tokens=config.min_draft_tokens))
        return Hybrid(members)


@dataclass(frozen=True, slots=True)
class Member:
    """A drafter of a hybrid: what it is called, what it may draft, and when its draft is good enough."""

    name: str
    guarded: GuardedDrafter
    max_tokens: int
    min_draft_tokens: int

    def propose(self, requests: Listing[DraftRequest], context: DraftContext) -> list[Draft]:
        """A draft with its source for each of `requests`, some of those of the step."""
        return [
            replace(draft, source=self.name) if draft.token_ids else NO_DRAFT
            for draft in self.guarded.propose([self._within_limits(one) for one in requests], context.features)
        ]

    def is_good_enough(self, draft: Draft, request: DraftRequest) -> bool:
        """Whether `draft` is deep enough, or as deep as `request` allows."""
        return draft.depth >= min(self.min_draft_tokens, request.max_tokens, request.max_depth)

    def _within_limits(self, request: DraftRequest) -> DraftRequest:
        if request.max_tokens <= self.max_tokens:
            return request
        return replace(request, max_tokens=self.max_tokens, max_depth=min(request.max_depth, self.max_tokens))


class Hybrid:
    """Asks its drafters one after the other, each for the sequences that have no good draft yet.

    So a model computes nothing for a sequence that copies; when it is asked again it catches up.
    Where no draft is good enough the last drafter's stands, and where that is silent the first one's
    that was not. A drafter that fails is silent, no more.

    Of the scratch blocks all drafters use the same: each drafts for its sequences and is done before
    the next one starts, and nobody reads there what another has written.
    """

    def __init__(self, members: Listing[Member]) -> None:
        drafters = [member.guarded.drafter for member in members]
        self.needs: frozenset[str] = frozenset().union(*(drafter.needs for drafter in drafters))
        self._members = members
        self._keepers = [drafter for drafter in drafters if isinstance(drafter, KeepsKV)]
        self.kv_bytes_per_block = sum(keeper.kv_bytes_per_block for keeper in self._keepers)
        self.num_scratch_blocks = max((keeper.num_scratch_blocks for keeper in self._keepers), default=0)

    @property
    def num_member_failures(self) -> int:
        """What the drafters' guards have caught."""
        return sum(member.guarded.num_failures for member in self._members)

    def use_kv(self, target_cache: KVCache, *, num_blocks: int) -> None:
        """Let each drafter with KV take its memory."""
        for keeper in self._keepers:
            keeper.use_kv(target_cache, num_blocks=num_blocks)

    def start(self, sequence: Sequence) -> None:
        """Tell all drafters."""
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
        """Tell all drafters."""
        for member in self._members:
            member.guarded.stop(sequence)
