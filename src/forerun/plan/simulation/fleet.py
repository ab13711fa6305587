"""Replicas behind a router, all in one virtual time: who steps next, what arrives meanwhile, and where it goes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import NamedTuple

from forerun.engine.simulation import SimulationSettings
from forerun.engine.speculation import SpeculationControl
from forerun.errors import ConfigError
from forerun.plan.simulation.records import RequestRecord
from forerun.plan.simulation.replica import Ended, Replica, Sent
from forerun.plan.simulation.replica_group import Lifetime, ReplicaGroup
from forerun.plan.simulation.requests import SimulatedRequest
from forerun.plan.simulation.routing import routing_policy

NOTICE, CHANGE, ARRIVAL, STEP = 0, 1, 2, 3
"""The order of events of one moment.

What has ended is known first, then replicas start or drain, then the next request is sent, and at last a step is taken.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What it costs to hand a prompt's KV from the replica that has read it to the one that answers.

    Raises:
        ConfigError: a number is out of range.
    """

    seconds: float = 0.0  # of each
    bytes_per_second: float = float("inf")
    bytes_per_token: float = 0.0  # of KV

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < math.inf or not self.bytes_per_second > 0 or not self.bytes_per_token >= 0:
            raise ConfigError(
                f"transfer: got {self.seconds:g} s, {self.bytes_per_second:g} bytes per second, {self.bytes_per_token:g} "
                "bytes per token; times and sizes must be 0 or more, the rate above 0"
            )

    def of_prompt(self, num_tokens: int) -> float:
        """Seconds for a prompt of so many tokens."""
        return self.seconds + num_tokens * self.bytes_per_token / self.bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChange:
    """So many engines of each kind serve from a time on, in seconds; see `ReplicaGroup.resize`."""

    at: float
    replicas: int
    prefill_replicas: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """How many engines serve, and how requests are spread over them.

    With `prefill_replicas` these read the prompts and write the first token, and `replicas` do the rest,
    to which the KV is handed over. `changes` are other numbers of them, in the order of their times.

    Raises:
        ConfigError: a number is out of range, changes are not in order, or there is no such policy.
    """

    replicas: int = 1
    prefill_replicas: int = 0
    routing: str = "round-robin"
    transfer: Transfer = field(default_factory=Transfer)
    changes: tuple[FleetChange, ...] = ()

    def __post_init__(self) -> None:
        self._check_counts(self.replicas, self.prefill_replicas)
        for change in self.changes:
            self._check_counts(change.replicas, change.prefill_replicas)
            if bool(change.prefill_replicas) != bool(self.prefill_replicas):
                raise ConfigError(
                    f"changes: got {change.prefill_replicas} prefill replicas after {self.prefill_replicas}; prompts are read "
                    "apart always or never: must be 0 in all, or above 0 in all"
                )
        times = [0.0, *(change.at for change in self.changes)]
        for before, at in pairwise(times):
            if not before <= at < math.inf:
                raise ConfigError(
                    f"changes: got one at {at:g} s after {before:g} s; must be sorted by time, 0 or later"
                )
        routing_policy(self.routing, 0)

    @staticmethod
    def _check_counts(replicas: int, prefill_replicas: int) -> None:
        for name, got, least in (("replicas", replicas, 1), ("prefill_replicas", prefill_replicas, 0)):
            if got < least:
                raise ConfigError(f"{name}: got {got}; must be {least} or more")


class _Sending(NamedTuple):
    """A request on its way to a replica of one kind."""

    group: ReplicaGroup
    sent: Sent
    has_kv: bool


class _Notice(NamedTuple):
    """A router hears that a request has ended; replica and request are given by number."""

    group: ReplicaGroup
    replica: int
    request: int


class _Step(NamedTuple):
    """A replica takes its next step."""

    group: ReplicaGroup
    replica: Replica


_Event = _Notice | FleetChange | _Sending | _Step


class FleetRun:
    """One run of requests through a fleet.

    Args:
        fleet: the replicas.
        settings: of each engine.
        make_control: called once for each engine that decodes.
        seed: of prompts' tokens, texts and routing.
        keeps_chunks: whether records keep the time of each chunk.

    Raises:
        ConfigError: the engines have no prefix cache, through which KV would be handed over.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: SimulationSettings,
        make_control: Callable[[], SpeculationControl],
        *,
        seed: int,
        keeps_chunks: bool,
    ) -> None:
        if fleet.prefill_replicas and not settings.enable_prefix_caching:
            raise ConfigError("prefill_replicas: KV is handed over through the prefix cache; turn prefix caching on")
        self._fleet = fleet
        self._settings = settings
        self._seed = seed

        def group(num_replicas: int, seed: int) -> ReplicaGroup:
            policy = routing_policy(fleet.routing, seed)
            looks_ahead = settings.decode_seconds is not None and not policy.reads_caches

            def make_replica(number: int) -> Replica:
                return Replica(number, settings, make_control(), keeps_chunks=keeps_chunks, looks_ahead=looks_ahead)

            return ReplicaGroup(make_replica, policy, num_replicas, block_size=settings.block_size)

        self._serving = group(fleet.replicas, seed)
        self._prefill = group(fleet.prefill_replicas, seed + 1) if fleet.prefill_replicas else None
        self._events: list[tuple[float, int, int, _Event]] = []  # a heap
        self._order = count()
        self._next_step: dict[int, int] = {}  # a replica's id -> the order of the event that is its next step
        for change in fleet.changes:
            self._push(change.at, CHANGE, change)

    @property
    def replicas(self) -> Sequence[Replica]:
        """Those that decode."""
        return self._serving.replicas

    @property
    def prefill_replicas(self) -> Sequence[Replica]:
        """Those that only read prompts."""
        return [] if self._prefill is None else self._prefill.replicas

    @property
    def lifetimes(self) -> list[Lifetime]:
        """When each replica was up: those that decode, then those that only read prompts."""
        return [*self._serving.lifetimes, *(self._prefill.lifetimes if self._prefill else ())]

    def run(
        self, requests: Sequence[SimulatedRequest], progress: Callable[[int], None] = lambda _: None
    ) -> list[RequestRecord]:
        """Serve all requests; their records in order. `progress` is called with how many have ended."""
        records = []
        arrivals = iter(enumerate(requests))
        upcoming = next(arrivals, None)
        num_ended = 0
        while self._events or upcoming is not None:
            if upcoming is not None and self._is_next(upcoming[1].arrival):
                number, request = upcoming
                upcoming = next(arrivals, None)
                record = RequestRecord(
                    number=number,
                    arrival=request.arrival,
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_output_tokens=request.num_output_tokens,
                )
                records.append(record)
                self._arrive(request, record)
                continue
            time, _, order, event = heapq.heappop(self._events)
            match event:
                case _Notice():
                    event.group.note_end(event.replica, event.request, time)
                case FleetChange():
                    self._serving.resize(event.replicas, time)
                    if self._prefill is not None:
                        self._prefill.resize(event.prefill_replicas, time)
                case _Sending():
                    self._send(event, time)
                case _Step():
                    num_ended += self._step(event.group, event.replica, order)
                    progress(num_ended)
        return records

    def _is_next(self, arrival: float) -> bool:
        return not self._events or (arrival, ARRIVAL) < self._events[0][:2]

    def _push(self, time: float, kind: int, event: _Event) -> None:
        heapq.heappush(self._events, (time, kind, next(self._order), event))

    def _arrive(self, request: SimulatedRequest, record: RequestRecord) -> None:
        """A request arrives at the fleet."""
        prompt_ids = request.prompt_tokens(record.number, vocab_size=self._settings.vocab_size, seed=self._seed)
        seed = request_seed(self._seed, record.number)
        if self._prefill is None:
            sent = Sent(record, prompt_ids, request.num_output_tokens, seed)
            self._send(_Sending(self._serving, sent, has_kv=False), request.arrival)
        else:
            self._send(_Sending(self._prefill, Sent(record, prompt_ids, 1, seed), has_kv=False), request.arrival)

    def _send(self, sending: _Sending, time: float) -> None:
        """A router sends a request to a replica."""
        replica = sending.group.choose(sending.sent)
        if sending.has_kv:
            replica.submit_with_kv(sending.sent, time)
        else:
            replica.submit(sending.sent, time)
        self._await_step(sending.group, replica)

    def _await_step(self, group: ReplicaGroup, replica: Replica) -> None:
        """Put a replica's next step among the events; the one that was there before is void."""
        number = next(self._order)
        self._next_step[id(replica)] = number
        if replica.has_work:
            heapq.heappush(self._events, (replica.next_event, STEP, number, _Step(group, replica)))

    def _step(self, group: ReplicaGroup, replica: Replica, number: int) -> int:
        """Let a replica take its step, unless the event is void; the number of requests that have ended."""
        if self._next_step[id(replica)] != number:
            return 0
        ended = replica.step()
        now = replica.clock.now
        num_ended = 0
        for one in ended:
            self._push(now, NOTICE, _Notice(group, replica.number, one.sent.record.number))
            if group is self._prefill and one.sent.record.num_output_tokens > 1:
                self._hand_over(one, now)
            else:
                num_ended += 1
        self._await_step(group, replica)
        return num_ended

    def _hand_over(self, read: Ended, now: float) -> None:
        """Send a request whose prompt was read to the replicas that decode; its KV arrives there after its transfer."""
        sent, record = read.sent, read.sent.record
        prompt_ids = sent.prompt_ids + read.token_ids
        sending = _Sending(
            self._serving, Sent(record, prompt_ids, record.num_output_tokens - 1, sent.seed), has_kv=True
        )
        self._push(now + self._fleet.transfer.of_prompt(record.num_prompt_tokens), ARRIVAL, sending)


def request_seed(seed: int, number: int) -> int:
    """The sampling seed of a request: it names the request's text."""
    return (seed << 32) + number
