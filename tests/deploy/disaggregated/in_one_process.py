"""Two engines in this process that hand KV over as two processes do: the one that reads prompts runs in a thread."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from forerun.deploy.disaggregated.channel import Channel
from forerun.deploy.disaggregated.engine import DisaggregatedEngine
from forerun.deploy.disaggregated.prefill import PrefillServer
from forerun.deploy.disaggregated.prefill_client import PrefillClient
from tests.engines import tiny_llm

needs_shared_memory = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux shares memory so")


@contextmanager
def channels():
    """Both ends of a connection."""
    own, other = (Channel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        yield own, other
    finally:
        own.close()
        other.close()


@contextmanager
def disaggregated(config=None, *, max_local_prefill_length=0, prefill=None, **settings):
    """An LLM that answers, and the `DisaggregatedEngine` that it uses; `prefill` are other settings of the one that reads."""
    reader = tiny_llm(config, **(settings | (prefill or {})))
    llm = tiny_llm(config, **settings)
    with channels() as (own, other):
        thread = threading.Thread(target=_serve, args=(reader, other))
        thread.start()
        client = PrefillClient(own, end_of=lambda: "it was closed")
        engine = DisaggregatedEngine(llm.engine, client, max_local_prefill_length=max_local_prefill_length)
        llm._client = engine
        try:
            yield llm, engine
        finally:
            own.close()
            thread.join(20)
            assert not thread.is_alive()


def _serve(llm, channel):
    with suppress(EOFError, OSError):
        PrefillServer(llm, channel).run()
