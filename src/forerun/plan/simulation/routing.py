"""Which replica gets a request: policies that know what a router in front of the replicas knows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.errors import ConfigError, did_you_mean


@dataclass(slots=True)
class ReplicaLoad:
    """What a router has sent to a replica and not seen the end of."""

    num_requests: int = 0
    num_tokens: int = 0  # of their prompts


class RoutedPrompt(Protocol):
    """A request that a replica is chosen for."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        ...

    def num_cached_tokens(self, replica: int) -> int:
        """The tokens that a replica has in its prefix cache, as its KV events tell."""
        ...


class RoutingPolicy(Protocol):
    """Chooses a replica for each request; `reads_caches` says whether it asks what they have cached."""

    reads_caches: bool

    def choose(self, prompt: RoutedPrompt, loads: Sequence[ReplicaLoad]) -> int:
        """The number of the replica."""
        ...


class RoundRobin:
    """Each in turn."""

    reads_caches = False

    def __init__(self) -> None:
        self._next = 0

    def choose(self, prompt: RoutedPrompt, loads: Sequence[ReplicaLoad]) -> int:  # noqa: ARG002
        """See `RoutingPolicy`."""
        chosen = self._next % len(loads)  # there may be fewer than before
        self._next = chosen + 1
        return chosen


class LeastRequests:
    """The one with the fewest requests under way."""

    reads_caches = False

    def choose(self, prompt: RoutedPrompt, loads: Sequence[ReplicaLoad]) -> int:  # noqa: ARG002
        """See `RoutingPolicy`."""
        return min(range(len(loads)), key=lambda replica: loads[replica].num_requests)


class LeastTokens:
    """The one with the fewest prompt tokens of requests under way."""

    reads_caches = False

    def choose(self, prompt: RoutedPrompt, loads: Sequence[ReplicaLoad]) -> int:  # noqa: ARG002
        """See `RoutingPolicy`."""
        return min(range(len(loads)), key=lambda replica: loads[replica].num_tokens)


class RandomOfTwo:
    """Of two random ones the one with fewer requests under way."""

    reads_caches = False

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, prompt: RoutedPrompt, loads: Sequence[ReplicaLoad]) -> int:  # noqa: ARG002
        """See `RoutingPolicy`."""
        if len(loads) == 1:
            return 0
        first, second = self._random.sample(range(len(loads)), 2)
        return second if loads[second].num_requests < loads[first].num_requests else first


def prefix_cost(prompt: RoutedPrompt, loads: Sequence[ReplicaLoad], replica: int) -> int:
    """What a replica would have to do before this prompt is read: tokens of it that are not cached there, and of prompts under way."""
    return prompt.num_tokens - prompt.num_cached_tokens(replica) + loads[replica].num_tokens


class PrefixAffinity:
    """The one with the least to do: tokens of this prompt that it has not cached, and of prompts under way."""

    reads_caches = True

    def choose(self, prompt: RoutedPrompt, loads: Sequence[ReplicaLoad]) -> int:
        """See `RoutingPolicy`."""
        return min(range(len(loads)), key=lambda replica: prefix_cost(prompt, loads, replica))


ROUTING: dict[str, Callable[[int], RoutingPolicy]] = {
    "round-robin": lambda _: RoundRobin(),
    "least-requests": lambda _: LeastRequests(),
    "least-tokens": lambda _: LeastTokens(),
    "prefix": lambda _: PrefixAffinity(),
    "random-of-two": RandomOfTwo,
}
"""The policies by name; each is made with a seed."""


def routing_policy(name: str, seed: int) -> RoutingPolicy:
    """A fresh policy.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in ROUTING:
        raise ConfigError(f"routing: got {name!r}{did_you_mean(name, ROUTING)}")
    return ROUTING[name](seed)
