"""A Ray cluster of this machine as an operator would start it: replicas come and go under load, and no request fails.

python -m benchmarks.peers install ray
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
from contextlib import suppress

import psutil
import pytest

from forerun import LLM, SamplingParams
from forerun.deploy.ray.prefix_header import IMPORT_PATH, IMPORT_VARIABLE
from tests.slow.environments import interpreter_of
from tests.slow.ray_services import (
    MODEL,
    Load,
    Service,
    command,
    environment,
    free_port,
    needs_two_cores,
    wait_until,
)
from tests.tensor_parallel import cores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def variables():
    """The environment of a cluster, and of whoever may use it."""
    return environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@pytest.fixture
def cluster(tmp_path, variables):
    """The address of a cluster."""
    address = f"127.0.0.1:{free_port()}"
    ray = str(interpreter_of("ray").parent / "ray")
    started = subprocess.Popen(
        [
            *(ray, "start", "--head", "--block", "--port", address.rpartition(":")[2], "--num-cpus", "2"),
            *("--include-dashboard", "false", "--object-store-memory", str(80 << 20)),
        ],
        env=variables | {IMPORT_VARIABLE: IMPORT_PATH},
        stdout=(tmp_path / "ray.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        log = tmp_path / "ray.log"
        wait_until(lambda: "--block" in log.read_text(), seconds=60, what=log.read_text())
        yield address
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(60)


@needs_two_cores
def test_no_request_fails_while_replicas_come_and_go(cluster, variables):
    port = free_port()

    def deploy(count):
        done = subprocess.run(
            command("deploy", "ray", MODEL, "--address", cluster, "--replicas", count, "--port", port),
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    deploy(1)
    service = Service(port, None)
    with Load(service, max_tokens=80) as load:
        for count in (2, 1):
            deploy(count)
            wait_until(
                lambda count=count: len(service.metric("vllm:num_requests_running")) == count,
                seconds=120,
                what=f"not {count} replicas",
            )
            served = load.served
            wait_until(lambda served=served: load.served >= served + 8, seconds=120, what="no load")
    assert load.failures == []


@needs_two_cores
def test_a_tensor_parallel_replica_is_placed_as_one_group_and_replaced_when_one_of_its_processes_ends(
    cluster, variables
):
    port = free_port()
    words = [
        *("--address", cluster, "--replicas", 1, "--cpus-per-replica", 2, "--tensor-parallel-size", 2),
        *("--port", port, "--max-model-len", 512),
    ]
    done = subprocess.run(
        command("deploy", "ray", MODEL, *words), env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    service = Service(port, None)
    text = service.complete("The sea is", max_tokens=16)
    with cores(2):
        (alone,) = LLM(MODEL, max_model_len=512).generate(["The sea is"], SamplingParams(temperature=0, max_tokens=16))
    assert text == alone.outputs[0].text
    (rank,) = ranks()
    os.kill(rank.pid, signal.SIGKILL)
    wait_until(lambda: [one.pid for one in ranks()] not in ([], [rank.pid]), seconds=120, what="no other replica")

    def answers():
        fields = {"model": MODEL, "prompt": "The sea is", "max_tokens": 16, "temperature": 0}
        status, body = service.ask("/v1/completions", fields)
        return status == 200 and json.loads(body)["choices"][0]["text"] == text

    wait_until(answers, seconds=120, what="the new replica does not answer")


def ranks():
    """The processes on this machine that are ranks beside a replica."""
    found = []
    for one in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):
            is_rank = "forerun.executor.tensor_parallel.worker" in (one.info["cmdline"] or [])
            if is_rank and one.parent().cmdline()[0].startswith("ray::"):
                found.append(one)
    return found


@needs_two_cores
def test_a_port_that_is_taken_is_named_and_another_one_serves(cluster, variables):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = ["--address", cluster, "--replicas", 1, "--max-model-len", 512, "--port"]
        refused = subprocess.run(
            command("deploy", "ray", MODEL, *words, taken.getsockname()[1]),
            env=variables,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert refused.returncode == 2
        assert re.search(r"--port \d+: Ray's HTTP proxy cannot listen there", refused.stderr.splitlines()[-1])
        port = free_port()
        done = subprocess.run(
            command("deploy", "ray", MODEL, *words, port),
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert Service(port, None).complete("The sea is", max_tokens=4)


def test_where_no_cluster_answers_it_is_said():
    done = subprocess.run(
        command("deploy", "ray", MODEL, "--address", f"127.0.0.1:{free_port()}"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 2
    assert "no Ray cluster answers there" in done.stderr.splitlines()[-1]
