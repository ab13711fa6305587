"""Parsing of a server's metrics, and acceptance between two readings of them."""

from __future__ import annotations

import pytest

from forerun.bench.load.server import DraftCounts, Sample, count_drafts, parse_metrics

TEXT = r"""# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b\\c \"d\" }"} 3.0
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} +Inf 1395066363000
up 1
go_gc{} 2e-3
broken{ 1
vllm:x nonsense
"""


def metrics(drafts, drafted, accepted, positions, engine=0):
    lines = [
        f'vllm:spec_decode_num_drafts_total{{engine="{engine}"}} {drafts}',
        f'vllm:spec_decode_num_drafts_created{{engine="{engine}"}} 1.7e9',
        f'vllm:spec_decode_num_draft_tokens_total{{engine="{engine}"}} {drafted}',
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="{engine}"}} {accepted}',
    ]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{name}{{position="{place}",engine="{engine}"}} {count}' for place, count in enumerate(positions)]
    return "\n".join(lines) + "\n"


def test_samples_have_names_labels_and_values():
    assert parse_metrics(TEXT) == [
        Sample("vllm:num_requests_running", {"engine": "0", "model_name": 'a b\\c "d" }'}, 3.0),
        Sample("vllm:e2e_request_latency_seconds_bucket", {"le": "+Inf"}, float("inf")),
        Sample("up", {}, 1.0),
        Sample("go_gc", {}, 0.002),
    ]


def test_what_prometheus_own_client_writes_is_read():
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    counter = client.Counter("vllm:spec_decode_num_drafts", "drafts", ["model_name"], registry=registry)
    counter.labels('odd "name"\n').inc(4)
    assert count_drafts(client.generate_latest(registry).decode()) == DraftCounts(4, 0, 0, {})


def test_drafts_are_summed_over_engines():
    text = metrics(10, 30, 12, [8, 4]) + metrics(1, 3, 2, [1, 1], engine=1)
    assert count_drafts(text) == DraftCounts(11, 33, 14, {0: 9, 1: 5})


def test_a_counter_that_is_no_number_is_left_out():
    assert count_drafts(metrics("NaN", 30, 12, [8, "+Inf"])) == DraftCounts(0, 30, 12, {0: 8})


def test_a_server_without_drafts_has_no_counts():
    assert count_drafts(TEXT) is None


def test_acceptance_is_that_between_the_looks():
    before, after = count_drafts(metrics(10, 30, 3, [2, 1])), count_drafts(metrics(30, 90, 33, [20, 10, 3]))
    found = after.since(before)
    assert found.to_json() == {
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_num_drafts": 20,
        "spec_decode_draft_tokens": 60,
        "spec_decode_accepted_tokens": 30,
        "spec_decode_per_position_acceptance_rates": [0.9, 0.45, 0.15],
    }


def test_a_server_that_counts_drafted_tokens_but_no_drafts_has_a_rate_alone():
    found = DraftCounts(0, 60, 30, {0: 20, 1: 10}).to_json()
    assert (found["spec_decode_acceptance_rate"], found["spec_decode_acceptance_length"]) == (50.0, None)
    assert found["spec_decode_per_position_acceptance_rates"] == []


def test_a_server_that_drafted_nothing_or_began_anew_has_no_acceptance():
    counts = DraftCounts(10, 30, 12, {0: 8})
    assert counts.since(counts) is None
    assert DraftCounts(1, 3, 1, {0: 1}).since(counts) is None
