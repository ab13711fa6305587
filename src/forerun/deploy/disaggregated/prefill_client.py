"""Asks the process that reads prompts, and takes what it has read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from forerun.deploy.disaggregated.channel import Channel, Message
from forerun.kv.transfer import BlockContents, TransferredKV

PATIENCE_S = 300.0  # with a process that says nothing: as long as a step may take by the server's --step-timeout
LAST_CHANCE_S = 1.0  # to find what it has said, where this process has been stopped itself


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt that the other process has done with.

    `kv` is None where the prompt is to be read here; `error` then says why the process has not read it, if it was asked.
    `read_seconds` is from the question to the prompt's last step, `transfer_seconds` from there until the KV lay in
    shared memory and this process had it.
    """

    request_id: str
    kv: TransferredKV | None
    error: str | None = None
    read_seconds: float = 0.0
    transfer_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Asked:
    request_id: str
    token_ids: Sequence[int]
    cache_salt: str | None


class PrefillClient:
    """The prompts that a process reads for this one.

    Args:
        channel: to the process.
        end_of: says how the process has ended, once its end of the channel is closed.
        patience: seconds after which a process is given up that has prompts and says nothing.
    """

    def __init__(self, channel: Channel, *, end_of: Callable[[], str], patience: float = PATIENCE_S) -> None:
        self._channel = channel
        self._end_of = end_of
        self._patience = patience
        self._names = map(str, itertools.count())  # of questions: a request's id may come again, for another prompt
        self._asked: dict[str, _Asked] = {}  # by the question's name
        self._unsent: dict[str, str] = {}  # of these: why the process has not been asked
        self._heard = 0.0  # of it last, or when it was asked first since
        self._is_over = False
        self._is_silent = False

    @property
    def is_over(self) -> bool:
        """Whether it has ended, as far as `take` has noticed."""
        return self._is_over

    def read(self, request_id: str, token_ids: Sequence[int], cache_salt: str | None) -> None:
        """Ask it to read a prompt; where it cannot be asked, `take` says so."""
        if not self._asked:
            self._heard = time.monotonic()
        name = next(self._names)
        self._asked[name] = _Asked(request_id, token_ids, cache_salt)
        header = {"read": name, "cache_salt": cache_salt}
        try:
            self._channel.send(header, [torch.tensor(token_ids, dtype=torch.int64)])
        except OSError as error:
            self._unsent[name] = str(error)

    def cancel(self, request_id: str) -> None:
        """Forget a prompt; one that was read already is dropped when it comes."""
        for name in [name for name, asked in self._asked.items() if asked.request_id == request_id]:
            del self._asked[name]
            self._unsent.pop(name, None)
            with suppress(OSError):  # it has ended, which `take` notices
                self._channel.send({"cancel": name})

    def take(self, timeout: float) -> Arrival | None:
        """The next prompt that was read; None where none comes within so many seconds.

        Where the process has ended, or is given up, the prompts that it has not read come back without KV.
        """
        deadline = time.monotonic() + timeout
        while not self._is_over:
            try:
                message = self._hear(0.0 if self._unsent else max(0.0, deadline - time.monotonic()))
            except EOFError:
                self._is_over = True
                break
            if message is None:
                return self._next_unsent()
            asked = self._asked.pop(message.header["request"], None) if "request" in message.header else None
            if asked is not None:
                return _arrival(message, asked)
        if not self._asked:
            return None
        name = next(iter(self._asked))
        request_id = self._asked.pop(name).request_id
        self._unsent.pop(name, None)
        silence = f"it had said nothing for {self._patience:g} s, and " if self._is_silent else ""
        return Arrival(request_id, None, f"the one that reads prompts is gone: {silence}{self._end_of()}")

    def _hear(self, timeout: float) -> Message | None:
        """The next message; the channel is closed where none has come for too long."""
        message = self._channel.receive(timeout)
        if message is None and self._asked and time.monotonic() - self._heard > self._patience:
            message = self._channel.receive(LAST_CHANCE_S)
            if message is None:
                self._is_silent = True
                self._channel.close()
                raise EOFError
        if message is not None:
            self._heard = time.monotonic()
        return message

    def _next_unsent(self) -> Arrival | None:
        if not self._unsent:
            return None
        name, error = self._unsent.popitem()
        request_id = self._asked.pop(name).request_id
        return Arrival(request_id, None, f"the one that reads prompts could not be asked ({error})")


def _arrival(message: Message, asked: _Asked) -> Arrival:
    header, tensors = message.header, iter(message.tensors)
    if "error" in header:
        return Arrival(asked.request_id, None, header["error"])
    if message.error is not None:
        return Arrival(asked.request_id, None, f"its KV could not be taken from shared memory ({message.error})")
    caches = tuple(
        BlockContents(tuple(places), tuple(next(tensors) for _ in range(count)))
        for places, count in zip(header["places"], header["num_tensors"], strict=True)
    )
    kv = TransferredKV(
        token_ids=tuple(asked.token_ids[: header["num_tokens"]]),
        cache_salt=asked.cache_salt,
        block_size=header["block_size"],
        caches=caches,
    )
    return Arrival(
        asked.request_id,
        kv,
        read_seconds=header["read_seconds"],
        transfer_seconds=time.monotonic() - header["sent"],
    )
