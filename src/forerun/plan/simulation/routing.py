"""Which replica gets a request: policies that know what a router in front of the replicas knows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from forerun.errors import ConfigError, did_you_mean

DECODE_TOKENS = 64
"""What a request under way counts for beside the tokens that it has to read, since it also writes; how many, no router knows."""

FREE_REQUESTS = 4
"""Requests under way that do not count so: an engine computes a few rows for little more than one."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a request adds to the load of the replica that it is sent to."""

    num_tokens: int  # of its prompt
    num_uncached_tokens: int  # of these, what the replica had not cached when it was sent


@dataclass(slots=True)
class ReplicaLoad:
    """What a router has sent to a replica and not seen the end of."""

    num_requests: int = 0
    num_tokens: int = 0  # of their prompts
    num_uncached_tokens: int = 0  # of these, what the replica had to read

    def add(self, request: RoutedRequest) -> None:
        """Note that a request is sent."""
        self.num_requests += 1
        self.num_tokens += request.num_tokens
        self.num_uncached_tokens += request.num_uncached_tokens

    def remove(self, request: RoutedRequest) -> None:
        """Note that a request has ended."""
        self.num_requests -= 1
        self.num_tokens -= request.num_tokens
        self.num_uncached_tokens -= request.num_uncached_tokens


class RoutedPrompt(Protocol):
    """A request that a replica is chosen for."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        ...

    def num_cached_tokens(self, replica: int) -> int:
        """The tokens that a replica has in its prefix cache, as its KV events tell."""
        ...


Cost = tuple[int, ...]
"""What a replica costs under a rule; the cheapest is chosen, the first of several."""


def request_cost(prompt: RoutedPrompt, load: ReplicaLoad, replica: int) -> Cost:  # noqa: ARG001
    """Requests under way."""
    return load.num_requests, load.num_tokens


def token_cost(prompt: RoutedPrompt, load: ReplicaLoad, replica: int) -> Cost:  # noqa: ARG001
    """Prompt tokens of requests under way."""
    return load.num_tokens, load.num_requests


def prefix_cost(prompt: RoutedPrompt, load: ReplicaLoad, replica: int) -> Cost:
    """What a replica would have to do: tokens to read that it has not cached, of this prompt and of those under way, and to write.

    A prompt under way that was cached costs next to nothing to read, so it does not drive the next prompt of the same
    beginning to a replica that would have to read all of it.
    """
    cached = prompt.num_cached_tokens(replica)
    to_read = prompt.num_tokens - cached + load.num_uncached_tokens
    to_write = DECODE_TOKENS * max(0, load.num_requests - FREE_REQUESTS)
    return to_read + to_write, -cached, load.num_requests


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


class Cheapest:
    """The one that costs least.

    Args:
        cost: of a replica for a prompt.
        reads_caches: whether the cost depends on what the replica has cached.
    """

    def __init__(self, cost: Callable[[RoutedPrompt, ReplicaLoad, int], Cost], *, reads_caches: bool = False) -> None:
        self.reads_caches = reads_caches
        self._cost = cost

    def choose(self, prompt: RoutedPrompt, loads: Sequence[ReplicaLoad]) -> int:
        """See `RoutingPolicy`."""
        return min(range(len(loads)), key=lambda replica: self._cost(prompt, loads[replica], replica))


class AnyAtRandom:
    """Any, whatever it has to do."""

    reads_caches = False

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, prompt: RoutedPrompt, loads: Sequence[ReplicaLoad]) -> int:  # noqa: ARG002
        """See `RoutingPolicy`."""
        return self._random.randrange(len(loads))


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


ROUTING: dict[str, Callable[[int], RoutingPolicy]] = {
    "round-robin": lambda _: RoundRobin(),
    "least-requests": lambda _: Cheapest(request_cost),
    "least-tokens": lambda _: Cheapest(token_cost),
    "prefix": lambda _: Cheapest(prefix_cost, reads_caches=True),
    "random": AnyAtRandom,
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
