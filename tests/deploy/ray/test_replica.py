"""What a replica tells Ray's autoscaler, and whom it answers."""

from __future__ import annotations

import asyncio
import re
import sys
from types import SimpleNamespace

import pytest

from forerun.core.outputs import CompletionOutput, RequestOutput
from forerun.deploy.ray import replica as replicas
from forerun.deploy.ray.fleet_metrics import ReplicaMetrics
from forerun.deploy.ray.load_meter import LoadMeter, ReplicaCounts
from forerun.deploy.ray.replica import EngineReplica
from forerun.engine.stats import Counter, Gauge
from forerun.server.metrics import ServerMetrics, expose
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


class Answer:
    """What Ray's handle gives of one replica."""

    def __init__(self, answer):
        self._answer = answer

    async def get_async(self):
        if self._answer is None:
            await asyncio.sleep(60)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.fixture
def metrics_of(engine, monkeypatch):
    """The metrics that a replica of rank 0 answers with, of a service whose replicas answer so to it."""

    def read(answers):
        class Asked:
            async def _fetch_replica_results_async(self):
                if answers is None:
                    await asyncio.sleep(60)
                return [Answer(one) for one in answers]

        serve = SimpleNamespace(
            get_replica_context=lambda: SimpleNamespace(
                rank=SimpleNamespace(rank=0), replica_tag="a", deployment="engine", app_name="forerun"
            ),
            get_deployment_handle=lambda *_: SimpleNamespace(broadcast=lambda _name: Asked()),
        )
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
        monkeypatch.setattr(replicas, "MOST_WAIT_S", 0.1)
        replica = EngineReplica.__new__(EngineReplica)
        replica.model = engine
        text = asyncio.run(replica.read_all_metrics()).decode()
        return re.findall(r'^vllm:num_requests_running{engine="(\d+)".*} (\S+)$', text, re.M)

    return read


def other(rank, replica):
    text = expose(ServerMetrics("model"), [Gauge("vllm:num_requests_running", 7)]).decode()
    return ReplicaMetrics(rank, replica, text)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([other(1, "b"), None], [("0", "0.0"), ("1", "7.0")]),
        ([RuntimeError("it ends"), other(2, "c")], [("0", "0.0"), ("2", "7.0")]),
        ([other(0, "a"), other(1, "b")], [("0", "7.0"), ("1", "7.0")]),
        (None, [("0", "0.0")]),
    ],
    ids=["silent", "failing", "all", "Ray is silent"],
)
def test_the_metrics_of_a_service_leave_out_those_who_do_not_answer(metrics_of, answers, expected):
    assert metrics_of(answers) == expected


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
