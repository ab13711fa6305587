"""/metrics: vLLM's names and labels, and numbers that are right."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.served import NAME, PROMPT, chat_llm, knows_all, served

BODY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "ignore_eos": True}


def samples(server):
    """(name, labels but the common ones) -> value."""
    status, headers, text = server.send("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith(("vllm:", "forerun:")):
                assert labels.pop("model_name") == NAME
                assert labels.pop("engine") == "0"
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


@pytest.fixture(scope="module")
def after():
    with served(chat_llm(knows_all(PROMPT))) as server:
        for _ in range(2):
            server.post("/v1/completions", BODY)
        server.stream("/v1/completions", BODY | {"n": 2})
        yield samples(server), server.llm.stats.speculation.copy()


def test_counts_are_the_engines(after):
    found, spec = after
    assert found["vllm:generation_tokens_total", ()] == 80
    assert found["vllm:request_success_total", (("finished_reason", "length"),)] == 4
    assert found["vllm:num_requests_running", ()] == found["vllm:num_requests_waiting", ()] == 0
    assert found["vllm:kv_cache_usage_perc", ()] == 0
    assert found["vllm:prefix_cache_hits_total", ()] > 0
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert found[f"vllm:spec_decode_{name}_total", ()] == getattr(spec, name) > 0


def test_the_kv_memory_is_told_in_blocks_and_their_size():
    with served(chat_llm(knows_all(PROMPT))) as server:
        [labels] = [dict(labels) for name, labels in samples(server) if name == "vllm:cache_config_info"]
        engine = server.llm.engine.state
        assert labels == {"num_gpu_blocks": str(engine.num_blocks), "block_size": str(engine.block_size)}
        assert engine.num_blocks > 0 < engine.block_size


def test_acceptance_is_told_per_position(after):
    found, spec = after
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    reported = [found[name, (("position", str(place)),)] for place in range(4)]
    assert reported == (spec.accepted_per_position + [0] * 4)[:4]
    assert sum(reported) == spec.num_accepted_tokens


def test_latencies_are_counted_per_request(after):
    found, _ = after
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert found[f"vllm:{name}_seconds_count", ()] == 3
        assert found[f"vllm:{name}_seconds_sum", ()] > 0
    assert found["vllm:e2e_request_latency_seconds_sum", ()] >= found["vllm:request_decode_time_seconds_sum", ()]
    assert found["vllm:request_generation_tokens_sum", ()] == 80
    assert found["vllm:request_prompt_tokens_sum", ()] == 27
    assert found["vllm:request_params_n_sum", ()] == 4
    assert found["vllm:iteration_tokens_total_sum", ()] == 80
    steps = found["vllm:iteration_tokens_total_count", ()]
    assert 0 < found["vllm:inter_token_latency_seconds_count", ()] < 80
    assert steps < 80


def test_the_rest_has_a_name_of_our_own(after):
    found, _ = after
    assert found["forerun:num_verified_steps_total", ()] > 0
    assert {labels[0][1] for name, labels in found if name == "forerun:phase_seconds"} >= {"forward", "draft"}
    assert ("process_resident_memory_bytes", ()) in found


def test_nothing_is_remembered_of_ended_requests(plain):
    plain.post("/v1/completions", BODY | {"n": 3})
    assert plain.model.metrics._last_times == {}
