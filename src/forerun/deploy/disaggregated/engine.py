"""An engine whose long prompts are read by another process; it is used as any engine is (see `EngineClient`)."""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, replace

from forerun.core.outputs import RequestOutput
from forerun.deploy.disaggregated.prefill_client import Arrival, PrefillClient
from forerun.engine.client import EngineRequest, EngineSnapshot, StepOutput
from forerun.engine.engine import Engine
from forerun.engine.kv_transfer import import_kv, num_missing_tokens
from forerun.engine.stats import Counter, Gauge, Metric
from forerun.errors import ConfigError, RequestError
from forerun.kv.transfer import TransferredKV

logger = logging.getLogger(__name__)

ARRIVAL_WAIT_S = 0.005  # of a step that has nothing else to do, so that new requests do not wait long for it
MOST_AHEAD = 0.25  # of the KV memory: prompts that are read elsewhere, and those that were and wait for room


@dataclass(slots=True)
class TransferStats:
    """Sums over the prompts whose KV has come from the other process."""

    num_prompts: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    read_seconds: float = 0.0  # from the question to the prompt's last step there
    transfer_seconds: float = 0.0  # from there until this process took it from shared memory
    num_failures: int = 0  # prompts that were read here, since the other process could not

    def count(self, arrival: Arrival, kv: TransferredKV) -> None:
        """Count a prompt whose KV has been taken in."""
        self.num_prompts += 1
        self.num_tokens += len(kv.token_ids)
        self.num_bytes += kv.num_bytes
        self.read_seconds += arrival.read_seconds
        self.transfer_seconds += arrival.transfer_seconds


@dataclass(frozen=True, slots=True)
class DisaggregatedSnapshot(EngineSnapshot):
    """The engine's counters and state, and those of what has come from the other process."""

    transfers: TransferStats

    def metrics(self) -> list[Metric]:
        """See `EngineSnapshot`."""
        transfers = self.transfers
        return [
            *EngineSnapshot.metrics(self),
            Counter("forerun:kv_transfers", transfers.num_prompts),
            Counter("forerun:kv_transfer_tokens", transfers.num_tokens),
            Counter("forerun:kv_transfer_bytes", transfers.num_bytes),
            Gauge("forerun:kv_transfer_seconds", transfers.transfer_seconds),
            Counter("forerun:kv_transfer_failures", transfers.num_failures),
        ]


class DisaggregatedEngine:
    """Sends prompts to a process that reads them, takes their KV into the prefix cache, and answers.

    The text is the one that the engine alone writes: it finds the KV of a prompt as it finds that of any prompt which it
    has read before, computes what is missing, and draws the first token itself. So a process that dies costs time only:
    its prompts are read here.

    Args:
        engine: the one that answers; it must have a prefix cache.
        prefill: to the process that reads.
        max_local_prefill_length: prompts with at most so many tokens in blocks that are not cached here are read here.

    Raises:
        ConfigError: the engine has no prefix cache.
    """

    def __init__(self, engine: Engine, prefill: PrefillClient, *, max_local_prefill_length: int) -> None:
        if not engine.parts.pool.enable_prefix_caching:
            raise ConfigError(
                "enable_prefix_caching: got False; KV is handed over through the prefix cache: set it to True"
            )
        self.transfers = TransferStats()
        self._engine = engine
        self._prefill = prefill
        self._most_local = max_local_prefill_length
        self._accepting = threading.Lock()  # guards the next
        self._accepted: dict[str, EngineRequest] = {}  # not submitted
        self._unread: dict[str, EngineRequest] = {}  # the oldest first; to be read there, and not asked for yet
        self._reading: dict[str, int] = {}  # there: the blocks that each will fill
        self._arrived: deque[Arrival] = deque()  # the first waits for memory for its KV, the others for their turn

    @property
    def has_work(self) -> bool:
        """See `EngineClient`."""
        return bool(self._engine.has_work or self._unread or self._reading or self._arrived)

    def accept(self, request: EngineRequest) -> None:
        """See `EngineClient`."""
        request_id = request.request_id
        with self._accepting:
            if request_id in self._accepted:
                raise RequestError(f"request_id: {request_id!r} is running already; choose another")
            self._accepted[request_id] = request
        try:
            self._engine.accept(request)
        except BaseException:
            with self._accepting:
                if self._accepted.get(request_id) is request:  # else it was withdrawn meanwhile
                    del self._accepted[request_id]
            raise

    def withdraw(self, request_id: str) -> None:
        """See `EngineClient`."""
        with self._accepting:
            self._accepted.pop(request_id, None)
        self._engine.withdraw(request_id)

    def submit(self, request_id: str) -> None:
        """See `EngineClient`; a prompt that is to be read elsewhere is queued here when it has been."""
        with self._accepting:
            request = self._accepted.pop(request_id)
        if not self._is_read_here(request, _token_ids(request)):
            self._unread[request_id] = request
            self._ask()
        elif self._arrived:  # which would never find memory if others always came first
            self._arrived.append(Arrival(request_id, None))
        else:
            self._engine.submit(request_id)

    def step(self) -> StepOutput:
        """See `EngineClient`."""
        self._take_arrivals()
        return self._engine.step() if self._engine.has_work else StepOutput()

    def stepping(self) -> AbstractContextManager[None]:
        """See `EngineClient`."""
        return self._engine.stepping()

    def abort(self, request_id: str) -> RequestOutput | None:
        """See `EngineClient`."""
        if self._take_back(request_id):
            self._engine.submit(request_id)  # where it ends as any that waits: counted and logged
        else:
            self.withdraw(request_id)
        return self._engine.abort(request_id)

    def _take_back(self, request_id: str) -> bool:
        """Let go of a request whose prompt is read elsewhere; False where this is none."""
        if self._unread.pop(request_id, None) is not None:
            return True
        if self._reading.pop(request_id, None) is not None:
            self._prefill.cancel(request_id)
            return True
        others = deque(one for one in self._arrived if one.request_id != request_id)
        is_here = len(others) < len(self._arrived)
        self._arrived = others
        return is_here

    def check_health(self) -> None:
        """See `EngineClient`; without the other process this one goes on alone."""
        self._engine.check_health()

    def finish_files(self, output: RequestOutput) -> None:
        """See `EngineClient`."""
        self._engine.finish_files(output)

    def wait_for_files(self) -> None:
        """See `EngineClient`."""
        self._engine.wait_for_files()

    def snapshot(self) -> DisaggregatedSnapshot:
        """See `EngineClient`; requests whose prompts are read elsewhere wait."""
        found = self._engine.snapshot()
        num_waiting = found.state.num_waiting + len(self._unread) + len(self._reading) + len(self._arrived)
        state = replace(found.state, num_waiting=num_waiting)
        return DisaggregatedSnapshot(found.stats, state, copy(self.transfers))

    def _is_read_here(self, request: EngineRequest, token_ids: list[int]) -> bool:
        """Whether the prompt is short, or cached, or its logits are wanted, or nobody else is there."""
        if self._prefill.is_over or request.sampling.prompt_logprobs is not None:
            return True
        if len(token_ids) <= self._most_local:
            return True
        return num_missing_tokens(self._engine.parts, token_ids, request.cache_salt) <= self._most_local

    def _ask(self) -> None:
        """Ask for the next prompts, as far as there will soon be room for their KV; for one in any case."""
        while self._unread:
            request_id, request = next(iter(self._unread.items()))
            num_blocks = (len(request.prompt_ids) + len(request.output_ids)) // self._engine.parts.block_size
            if not self._has_room_for(num_blocks):
                return
            del self._unread[request_id]
            token_ids = _token_ids(request)
            if self._is_read_here(request, token_ids):  # by now
                self._arrived.append(Arrival(request_id, None))
            else:
                self._reading[request_id] = num_blocks
                self._prefill.read(request_id, token_ids, request.cache_salt)

    def _has_room_for(self, num_blocks: int) -> bool:
        """Whether so many blocks of KV may come, beside those that will and those that wait for memory."""
        parts = self._engine.parts
        waiting = sum(len(one.kv.token_ids) for one in self._arrived if one.kv is not None) // parts.block_size
        num_ahead = sum(self._reading.values()) + waiting
        return not num_ahead or num_ahead + num_blocks <= MOST_AHEAD * parts.pool.num_blocks

    def _take_arrivals(self) -> None:
        """Queue the requests whose prompts have been read, and ask for others; without other work wait a moment for one."""
        timeout = 0.0 if self._engine.has_work or self._arrived else ARRIVAL_WAIT_S
        while self._reading and (arrival := self._prefill.take(timeout)) is not None:
            del self._reading[arrival.request_id]
            self._arrived.append(arrival)
            timeout = 0.0
        while self._arrived and self._queue(self._arrived[0]):
            self._arrived.popleft()
        self._ask()

    def _queue(self, arrival: Arrival) -> bool:
        """Take a prompt's KV in and queue its request; False while there is no memory for it."""
        kv = arrival.kv
        if kv is not None:
            scheduler = self._engine.parts.scheduler
            num_others = len(scheduler.running) + len(scheduler.waiting)
            if import_kv(self._engine.parts, kv, spare_blocks=num_others):
                self.transfers.count(arrival, kv)
            elif num_others:
                return False  # with nothing else to run, what has no room is computed here
        elif arrival.error is not None:
            self.transfers.num_failures += 1
            logger.warning("a prompt is read by the engine that answers it, since %s", arrival.error)
        self._engine.submit(arrival.request_id)
        return True


def _token_ids(request: EngineRequest) -> list[int]:
    return [int(token_id) for token_id in (*request.prompt_ids, *request.output_ids)]
