"""The metrics of several replicas as one text."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from forerun.deploy.ray.fleet_metrics import ReplicaMetrics, together
from forerun.engine.stats import Counter, Gauge
from forerun.server.metrics import ServerMetrics, expose


def text(count):
    return expose(
        ServerMetrics("m"), [Counter("vllm:generation_tokens", count), Gauge("vllm:num_requests_running", 1)]
    ).decode()


def samples(merged):
    families = list(text_string_to_metric_families(merged.decode()))
    assert len({one.name for one in families}) == len(families)
    return {
        (one.name, one.labels.get("engine"), one.labels.get("le")): one.value for f in families for one in f.samples
    }


def test_each_sample_bears_its_replica_number_and_no_family_comes_twice():
    found = samples(together([ReplicaMetrics(1, "y", text(20)), ReplicaMetrics(0, "x", text(10))]))
    assert found["vllm:generation_tokens_total", "0", None] == 10
    assert found["vllm:generation_tokens_total", "1", None] == 20
    assert found["vllm:time_to_first_token_seconds_count", "1", None] == 0
    assert found["vllm:time_to_first_token_seconds_bucket", "1", "+Inf"] == 0
    assert {engine for _, engine, _ in found} == {"0", "1"}


def test_ranks_that_are_being_changed_give_no_sample_twice():
    found = samples(together([ReplicaMetrics(1, "x", text(1)), ReplicaMetrics(1, "y", text(2))]))
    assert {found["vllm:generation_tokens_total", engine, None] for engine in "01"} == {1, 2}


def test_a_replica_keeps_its_number_where_one_of_lower_rank_does_not_answer():
    found = samples(together([ReplicaMetrics(2, "z", text(30)), ReplicaMetrics(0, "x", text(10))]))
    assert {engine for _, engine, _ in found} == {"0", "2"}
    assert found["vllm:generation_tokens_total", "2", None] == 30


def test_of_two_replicas_of_one_rank_the_second_gets_a_number_that_no_rank_has():
    found = samples(together([ReplicaMetrics(rank, str(place), text(1)) for place, rank in enumerate((0, 0, 1))]))
    assert {engine for _, engine, _ in found} == {"0", "1", "2"}


def test_one_replica_reads_like_a_server_alone():
    alone = text(5)
    assert samples(together([ReplicaMetrics(0, "x", alone)])).keys() >= {
        key for key in samples(alone.encode()) if key[1] is not None
    }
