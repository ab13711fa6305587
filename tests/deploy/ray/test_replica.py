"""What a replica tells Ray's autoscaler, and whom it answers."""

from __future__ import annotations

import asyncio

import pytest

from forerun.core.outputs import CompletionOutput, RequestOutput
from forerun.deploy.ray.load_meter import LoadMeter, ReplicaCounts
from forerun.deploy.ray.replica import EngineReplica
from forerun.engine.stats import Counter, Gauge
from forerun.server.metrics import ServerMetrics
from forerun.server.options import ServerOptions


class Engine:
    """A model in service that counts what ends, and answers unless it is silent."""

    def __init__(self):
        self.metrics = ServerMetrics("model")
        self.is_silent = False
        self.num_underway = 0

    async def engine_metrics(self):
        if self.is_silent:
            return []
        return [Gauge("vllm:num_requests_running", self.num_underway), Counter("vllm:generation_tokens", 12345)]

    def end(self, *lengths, reason="stop"):
        """A request of 1000 prompt tokens ends, with completions of these lengths."""
        outputs = [
            CompletionOutput(index=index, text="", token_ids=[7] * length, finish_reason=reason)
            for index, length in enumerate(lengths)
        ]
        output = RequestOutput(request_id="a", prompt=None, prompt_token_ids=[3] * 1000, outputs=outputs, finished=True)
        self.metrics.observe([], [output], 0.0)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def stats(engine):
    replica = EngineReplica.__new__(EngineReplica)  # without a model to load
    replica.model = engine
    return lambda: asyncio.run(replica.record_autoscaling_stats())


def load(stats):
    meter = LoadMeter()
    meter.take({"a": ReplicaCounts.from_stats(stats())})
    return meter.interval(10.0).load


def test_an_engine_that_does_not_answer_reports_no_counters(engine, stats):
    engine.end(100)
    assert stats()["finished"] == 1
    engine.is_silent = True
    assert stats() == {}


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_requests_that_were_not_served_count_with_the_tokens_that_they_had(engine, stats, reason):
    for _ in range(5):
        engine.end(100)
        engine.end(50, reason=reason)
    engine.num_underway = 10
    found = load(stats)
    assert (found.rate, found.isl, found.osl) == (2.0, 1000.0, 75.0)


def test_several_completions_are_as_many_requests_with_the_same_prompt(engine, stats):
    for _ in range(5):
        engine.end(100, 60, 20, 20)
    found = load(stats)
    assert (found.rate, found.isl, found.osl) == (2.0, 1000.0, 50.0)


@pytest.mark.parametrize(
    ("host", "keys", "status"),
    [("127.0.0.1", (), 403), ("0.0.0.0", (), 200), (None, (), 200), ("127.0.0.1", ("secret",), 200)],
)
def test_without_keys_replicas_behind_a_loopback_address_answer_no_page_of_elsewhere(engine, host, keys, status):
    replica = EngineReplica.__new__(EngineReplica)
    replica.model, replica._options, replica._host = engine, ServerOptions(api_key=keys), host
    headers = [(b"host", b"evil.example:8000"), *((b"authorization", b"Bearer %b" % key.encode()) for key in keys)]
    scope = {"type": "http", "method": "GET", "path": "/version", "query_string": b"", "headers": headers}
    sent = []

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        sent.append(message)

    asyncio.run(replica.__serve_build_asgi_app__()(scope, receive, send))
    assert sent[0]["status"] == status
