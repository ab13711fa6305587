"""A Ray cluster of this machine as an operator would start it: replicas come and go under load, and no request fails.

python -m benchmarks.peers install ray
"""

from __future__ import annotations

import secrets
import signal
import subprocess

import pytest

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
