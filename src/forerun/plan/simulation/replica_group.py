"""Replicas of one kind behind a router, whose number may change: new ones start empty, those that are given up drain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from forerun.plan.simulation.replica import Replica, Sent, prompt_digests
from forerun.plan.simulation.routing import ReplicaLoad, RoutedRequest, RoutingPolicy


@dataclass(slots=True)
class Lifetime:
    """When a replica was up, in seconds of the simulation: until it was drained, or to the end where `stop` is None."""

    start: float
    stop: float | None = None


class _Prompt:
    """A prompt before a router, with what the replicas' KV events tell of it."""

    def __init__(self, prompt_ids: list[int], replicas: Sequence[Replica], block_size: int) -> None:
        self._prompt_ids = prompt_ids
        self._replicas = replicas
        self._block_size = block_size

    @property
    def num_tokens(self) -> int:
        return len(self._prompt_ids)

    @cached_property
    def _digests(self) -> list[bytes]:
        return prompt_digests(self._prompt_ids, self._block_size)

    def num_cached_tokens(self, replica: int) -> int:
        return self._replicas[replica].num_cached_tokens(self._digests)


class ReplicaGroup:
    """Replicas of one kind and their router, which knows what it sent and what has ended.

    `replicas` are all that ever were, by number, and `lifetimes` says when each was up.

    Args:
        make_replica: makes a new replica with a number.
        policy: chooses among those that take requests.
        size: how many there are at first.
        block_size: tokens of a KV block.
    """

    def __init__(
        self, make_replica: Callable[[int], Replica], policy: RoutingPolicy, size: int, *, block_size: int
    ) -> None:
        self.replicas: list[Replica] = []
        self.lifetimes: list[Lifetime] = []
        self._make_replica = make_replica
        self._policy = policy
        self._block_size = block_size
        self._loads: list[ReplicaLoad] = []  # of all
        self._open: list[Replica] = []  # those that take requests
        self._open_loads: list[ReplicaLoad] = []
        self._draining: list[Replica] = []
        self._underway: dict[int, RoutedRequest] = {}  # by the request's number
        self.resize(size, 0.0)

    def choose(self, sent: Sent) -> Replica:
        """Send a request to a replica that takes requests."""
        prompt = _Prompt(sent.prompt_ids, self._open, self._block_size)
        place = self._policy.choose(prompt, self._open_loads)
        num_cached = prompt.num_cached_tokens(place) if self._policy.reads_caches else 0
        request = RoutedRequest(prompt.num_tokens, prompt.num_tokens - num_cached)
        self._underway[sent.record.number] = request
        self._open_loads[place].add(request)
        return self._open[place]

    def note_end(self, number: int, request: int, now: float) -> None:
        """Note that a replica is done with a request; both are given by number."""
        self._loads[number].remove(self._underway.pop(request))
        replica = self.replicas[number]
        if replica in self._draining and not self._loads[number].num_requests:
            self._draining.remove(replica)
            self.lifetimes[number].stop = now

    def resize(self, size: int, now: float) -> None:
        """Let `size` replicas take requests from now on.

        Those that are given up are the ones with the fewest requests, which they end before they stop. Where
        more are wanted, draining ones take requests again, the last to be given up first; then new ones start.
        """
        while len(self._open) > size:
            given_up = min(self._open, key=lambda one: (self._loads[one.number].num_requests, -one.number))
            self._open.remove(given_up)
            if self._loads[given_up.number].num_requests:
                self._draining.append(given_up)
            else:
                self.lifetimes[given_up.number].stop = now
        while len(self._open) < size:
            self._open.append(self._draining.pop() if self._draining else self._start(now))
        self._open.sort(key=lambda one: one.number)
        self._open_loads = [self._loads[one.number] for one in self._open]

    def _start(self, now: float) -> Replica:
        replica = self._make_replica(len(self.replicas))
        self.replicas.append(replica)
        self.lifetimes.append(Lifetime(now))
        self._loads.append(ReplicaLoad())
        return replica
