"""The server under a mixed load for minutes: every answer is right, and nothing is left behind.

A minute by default; SOAK_SECONDS says otherwise (make soak: 15 minutes).
"""

from __future__ import annotations

import asyncio
import os
import time
import urllib.request

import pytest

from benchmarks.serving import serving
from forerun import LLM
from tests.slow.soak import CHATS, COMPLETIONS, MISTAKES, Soak, make_questions

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
NUM_CLIENTS = 12
MODEL = "smollm2-135m"
MOST_GROWTH = 1.05
OPTIONS = {
    "--dtype": "float32",
    "--max-model-len": "512",
    "--max-num-seqs": "8",  # fewer than there are clients: some wait
    "--kv-cache-memory-bytes": str(24 << 20),  # too little for eight long ones: some are preempted
    "--speculative-config.method": "suffix",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + 2 * SECONDS)]


def metrics(server):
    """The server's metrics without labels, summed."""
    found = {}
    for line in urllib.request.urlopen(f"{server.url}/metrics").read().decode().splitlines():
        if not line.startswith("#"):
            name, value = line.partition("{")[0].split()[0], float(line.rsplit(" ", 1)[1])
            found[name] = found.get(name, 0) + value
    return found


def wait_for_rest(server):
    """Until nothing runs or waits, for departures that the server has still to notice."""
    end = time.monotonic() + 30
    while True:
        now = metrics(server)
        if not now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"] or time.monotonic() > end:
            return now
        time.sleep(0.1)


def test_a_mixed_load_leaves_nothing_behind(tmp_path, capsys):
    questions = make_questions(LLM(MODEL, dtype="float32", max_model_len=512))
    log = tmp_path / "log"
    with serving(MODEL, *(word for option in OPTIONS.items() for word in option), log=log) as server:
        soak = Soak(server.url, questions)
        asyncio.run(soak.run(SECONDS / 3, num_clients=NUM_CLIENTS, seed=1))
        wait_for_rest(server)
        before = server.resident_bytes()
        asyncio.run(soak.run(SECONDS * 2 / 3, num_clients=NUM_CLIENTS, seed=2))
        at_rest, after = wait_for_rest(server), server.resident_bytes()
        assert urllib.request.urlopen(f"{server.url}/health").status == 200
    with capsys.disabled():
        print(
            f"\n{soak.counts.total()} requests in {SECONDS:.0f} s, the slowest {soak.slowest:.1f} s: {dict(soak.counts)}"
        )
        print(f"resident {before / 2**20:.0f} MiB, then {after / 2**20:.0f} MiB")
        print(f"preempted {at_rest['vllm:num_preemptions_total']:.0f} times")
    assert soak.failures == []
    assert soak.counts.keys() >= {*COMPLETIONS, *CHATS, "left", *(mistake.kind for mistake in MISTAKES)}
    assert at_rest["vllm:num_requests_running"] == at_rest["vllm:num_requests_waiting"] == 0
    assert at_rest["vllm:kv_cache_usage_perc"] == 0
    assert at_rest["vllm:num_preemptions_total"] > 0
    assert at_rest["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert after <= before * MOST_GROWTH
    assert "Traceback" not in log.read_text()
