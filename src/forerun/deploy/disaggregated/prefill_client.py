"""Asks the process that reads prompts, and takes what it has read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from forerun.deploy.disaggregated.channel import Channel, Message
from forerun.kv.transfer import BlockContents, TransferredKV


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt that was read: its KV; None where it is to be read here, and why the process has not read it if it was asked.

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
    token_ids: Sequence[int]
    cache_salt: str | None


class PrefillClient:
    """The prompts that a process reads for this one.

    Args:
        channel: to the process.
        end_of: says how the process has ended, once its end of the channel is closed.
    """

    def __init__(self, channel: Channel, *, end_of: Callable[[], str]) -> None:
        self._channel = channel
        self._end_of = end_of
        self._asked: dict[str, _Asked] = {}
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether it has ended, as far as `take` has noticed."""
        return self._is_over

    def read(self, request_id: str, token_ids: Sequence[int], cache_salt: str | None) -> None:
        """Ask it to read a prompt; where it has ended, `take` says so."""
        self._asked[request_id] = _Asked(token_ids, cache_salt)
        self._say({"read": request_id, "cache_salt": cache_salt}, [torch.tensor(token_ids, dtype=torch.int64)])

    def cancel(self, request_id: str) -> None:
        """Forget a prompt; one that was read already is dropped when it comes."""
        if self._asked.pop(request_id, None) is not None:
            self._say({"cancel": request_id})

    def take(self, timeout: float) -> Arrival | None:
        """The next prompt that was read; None where none comes within so many seconds.

        Where the process has ended, the prompts that it has not read come back without KV.
        """
        deadline = time.monotonic() + timeout
        while not self._is_over:
            try:
                message = self._channel.receive(max(0.0, deadline - time.monotonic()))
            except EOFError:
                self._is_over = True
                break
            if message is None:
                return None
            asked = self._asked.pop(message.header["request"], None)
            if asked is not None:
                return _arrival(message, asked)
        if not self._asked:
            return None
        request_id = next(iter(self._asked))
        del self._asked[request_id]
        return Arrival(request_id, None, f"the one that reads prompts is gone: {self._end_of()}")

    def _say(self, header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        with suppress(OSError):  # it has ended, which `take` notices
            self._channel.send(header, tensors)


def _arrival(message: Message, asked: _Asked) -> Arrival:
    header, tensors = message.header, iter(message.tensors)
    if "error" in header:
        return Arrival(header["request"], None, header["error"])
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
        header["request"],
        kv,
        read_seconds=header["read_seconds"],
        transfer_seconds=time.monotonic() - header["sent"],
    )
