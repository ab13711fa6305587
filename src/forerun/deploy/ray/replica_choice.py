"""Which replica gets a request: by what each has been sent before, and by what it has under way.

Costs are those of the simulator (`plan/simulation/routing.py`), so what was planned is what runs. What a replica
has cached is taken from what it was sent: the newest prompts up to its KV memory.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from forerun.deploy.ray.prompt_prefix import TOKENS_PER_BLOCK, PromptPrefix
from forerun.errors import ConfigError, did_you_mean
from forerun.plan.simulation.routing import (
    Cost,
    ReplicaLoad,
    RoutedPrompt,
    RoutedRequest,
    prefix_cost,
    request_cost,
    token_cost,
)

Key = TypeVar("Key", bound=Hashable)

DEFAULT_KV_TOKENS = 1 << 17  # of a replica that has not said how many it has
MOST_SESSIONS = 1 << 16
SESSION_PATIENCE = 4
"""Requests that a session's replica may have under way beyond the one with the fewest, before the session moves."""

NO_PREFIX = PromptPrefix((), 0)


class _Underway(NamedTuple):
    """A request that was sent and has not ended."""

    replica: Hashable
    request: RoutedRequest
    new_digests: tuple[bytes, ...]  # that the replica had not been sent before


@dataclass(slots=True)
class _Known:
    """What is known of one replica."""

    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    digests: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # those used longest ago first
    kv_tokens: int = DEFAULT_KV_TOKENS

    def num_cached_tokens(self, prefix: PromptPrefix) -> int:
        """Tokens of the beginning of a prompt that this replica has read."""
        count = 0
        for digest in prefix.digests:
            if digest not in self.digests:
                break
            count += 1
        return min(prefix.num_tokens, count * TOKENS_PER_BLOCK)

    def add(self, prefix: PromptPrefix) -> tuple[bytes, ...]:
        """Note that it reads a prompt, and return the digests that are new.

        What was used longest ago is forgotten where it cannot hold all.
        """
        new = tuple(digest for digest in prefix.digests if digest not in self.digests)
        for digest in reversed(prefix.digests):  # the end of a prompt is forgotten before its beginning
            self.digests[digest] = None
            self.digests.move_to_end(digest)
        while len(self.digests) * TOKENS_PER_BLOCK > self.kv_tokens:
            self.digests.popitem(last=False)
        return new

    def forget(self, digests: Sequence[bytes]) -> None:
        """Note that it does not read a prompt after all, whose digests were new."""
        for digest in digests:
            self.digests.pop(digest, None)


class _Prompt:
    """A request as the rules of routing see it."""

    def __init__(self, num_tokens: int, cached: Sequence[int]) -> None:
        self.num_tokens = num_tokens
        self._cached = cached

    def num_cached_tokens(self, replica: int) -> int:
        return self._cached[replica]


class ReplicaChoice:
    """A router's memory, and its choice.

    A session's request goes to the replica that served the session last, unless that has too many more requests under
    way than the one with the fewest.

    Args:
        routing: the rule's name, as in `forerun simulate --routing`.

    Raises:
        ConfigError: there is no such rule.
    """

    def __init__(self, routing: str = "prefix") -> None:
        if routing not in COSTS:
            raise ConfigError(f"routing: got {routing!r}{did_you_mean(routing, COSTS)}")
        self._cost = COSTS[routing]
        self._known: dict[Hashable, _Known] = {}
        self._underway: dict[str, _Underway] = {}
        self._sessions: OrderedDict[bytes, Hashable] = OrderedDict()  # by digest: an id is as long as a client makes it
        self._num_chosen = 0

    def ranking(self, replicas: Sequence[Key], prefix: PromptPrefix | None, session: str = "") -> list[Key]:
        """The replicas, best first."""
        known = [self._known.setdefault(one, _Known()) for one in replicas]
        wanted = prefix or NO_PREFIX
        prompt = _Prompt(wanted.num_tokens, [one.num_cached_tokens(wanted) for one in known])
        loads = [one.load for one in known]
        self._num_chosen += 1
        turn = self._num_chosen % max(1, len(replicas))
        # replicas that are equally good take turns
        order = sorted(
            range(len(replicas)),
            key=lambda number: (self._cost(prompt, loads[number], number), (number - turn) % len(replicas)),
        )
        home = self._home(session, replicas, loads)
        if home is not None:
            order.sort(key=lambda number: number != home)  # stable: the others stay in their order
        return [replicas[number] for number in order]

    def _home(self, session: str, replicas: Sequence[Hashable], loads: Sequence[ReplicaLoad]) -> int | None:
        """The replica that a session's request should go to; None where any may be."""
        last = self._sessions.get(_session_key(session)) if session else None
        if last is None or last not in replicas:
            return None
        home = replicas.index(last)
        fewest = min(load.num_requests for load in loads)
        return home if loads[home].num_requests - fewest <= SESSION_PATIENCE else None

    def sent(self, request_id: str, replica: Hashable, prefix: PromptPrefix | None, session: str = "") -> None:
        """Note where a request goes; said again for the same request, the newer place counts, and the older has not read it."""
        moved = self._end(request_id)
        if moved is not None and moved.replica != replica and (left := self._known.get(moved.replica)) is not None:
            left.forget(moved.new_digests)
        known, wanted = self._known.setdefault(replica, _Known()), prefix or NO_PREFIX
        if moved is not None and moved.replica == replica:
            request, new_digests = moved.request, moved.new_digests  # what it had cached before
        else:
            request = RoutedRequest(wanted.num_tokens, wanted.num_tokens - known.num_cached_tokens(wanted))
            new_digests = known.add(wanted)
        known.load.add(request)
        self._underway[request_id] = _Underway(replica, request, new_digests)
        if session:
            key = _session_key(session)
            self._sessions[key] = replica
            self._sessions.move_to_end(key)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)

    def ended(self, request_id: str) -> None:
        """Note the end of a request; one that is not known is left alone."""
        self._end(request_id)

    def _end(self, request_id: str) -> _Underway | None:
        one = self._underway.pop(request_id, None)
        if one is not None and (known := self._known.get(one.replica)) is not None:
            known.load.remove(one.request)
        return one

    def set_memory(self, replica: Hashable, kv_tokens: int) -> None:
        """Note how many tokens a replica's KV memory holds."""
        self._known.setdefault(replica, _Known()).kv_tokens = kv_tokens

    def keep_only(self, replicas: Sequence[Hashable]) -> None:
        """Forget all other replicas, and their requests."""
        kept = set(replicas)
        for gone in self._known.keys() - kept:
            del self._known[gone]
        self._underway = {name: one for name, one in self._underway.items() if one.replica in kept}
        for session in [name for name, one in self._sessions.items() if one not in kept]:
            del self._sessions[session]

    def load_of(self, replica: Hashable) -> ReplicaLoad:
        """What a replica has under way."""
        return self._known.setdefault(replica, _Known()).load


def _session_key(session: str) -> bytes:
    return hashlib.sha256(session.encode("utf-8", "surrogatepass")).digest()


def no_cost(prompt: RoutedPrompt, load: ReplicaLoad, replica: int) -> Cost:  # noqa: ARG001
    """All cost the same, so they take turns."""
    return ()


COSTS: dict[str, Callable[[RoutedPrompt, ReplicaLoad, int], Cost]] = {
    "prefix": prefix_cost,
    "least-requests": request_cost,
    "least-tokens": token_cost,
    "round-robin": no_cost,
}
"""What a replica costs under each rule; the cheapest is chosen, and those that cost the same take turns."""
