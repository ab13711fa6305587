"""Services on Ray for slow tests, in the environment of `python -m benchmarks.peers install ray`."""

from __future__ import annotations

import http.client
import json
import os
import signal
import site
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

import forerun
from forerun.deploy.ray.options import num_processors
from tests.slow.environments import interpreter_of

MODEL = "smollm2-135m"
PROGRAM = "from forerun.cli.program import program; program()"
needs_two_cores = pytest.mark.skipif(num_processors() < 2, reason="two replicas take two cores")
START_S = 180
STOP_S = 60


def environment():
    """Ray's packages are that environment's own; torch and the others are those of the present interpreter."""
    paths = [str(Path(forerun.__file__).parents[1]), *site.getsitepackages()]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "RAY_USAGE_STATS_ENABLED": "0"}


def command(*words):
    return [str(interpreter_of("ray")), "-c", PROGRAM, *map(str, words)]


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Service:
    """A service that runs, asked over plain HTTP."""

    def __init__(self, port, root):
        self.port, self._root = port, root

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def ask(self, path, fields=None, headers=(), timeout=60):
        """The status and the body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            body = None if fields is None else json.dumps(fields)
            kind = {"content-type": "application/json"} | dict(headers)
            connection.request("GET" if body is None else "POST", path, body, kind)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def complete(self, prompt, *, max_tokens=8, headers=(), **fields):
        """The text of a completion."""
        given = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | fields
        status, body = self.ask("/v1/completions", given, headers)
        assert status == 200, body
        return json.loads(body)["choices"][0]["text"]

    def metric(self, name):
        """The sums of a metric by engine."""
        _, text = self.ask("/metrics")
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name:
                    engine = sample.labels["engine"]
                    found[engine] = found.get(engine, 0.0) + sample.value
        return found

    def replicas(self):
        """The processes that are replicas."""
        return [
            one
            for one in self._root.children(recursive=True)
            if any(part.startswith("ray::ServeReplica") for part in _command_line(one))
        ]


def _command_line(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextmanager
def serving(*words):
    """`forerun serve MODEL ...` on a free port."""
    port = free_port()
    process = subprocess.Popen(
        command("serve", MODEL, "--port", port, *words),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines, is_ready = [], threading.Event()

    def read():
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready:"):
                is_ready.set()
        is_ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert is_ready.wait(START_S), "".join(lines)
        assert process.poll() is None, "".join(lines)
        service = Service(port, psutil.Process(process.pid))
        yield service
        left = service.replicas()
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0, "".join(lines)
        assert not [one for one in left if one.is_running()]
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


class Load:
    """Clients that stream without a pause; each answer is counted, and each failure kept."""

    def __init__(self, service, *, num_clients=4, max_tokens=40):
        self.service = service
        self.served, self.failures = 0, []
        self._max_tokens = max_tokens
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(num_clients)]

    def __enter__(self):
        for one in self._threads:
            one.start()
        return self

    def __exit__(self, *_error):
        self._stopped.set()
        for one in self._threads:
            one.join()

    def _run(self, number):
        fields = {"model": MODEL, "max_tokens": self._max_tokens, "temperature": 0, "stream": True}
        turn = 0
        while not self._stopped.is_set():
            turn += 1
            try:
                status, body = self.service.ask(
                    "/v1/completions", fields | {"prompt": f"Client {number} asks for the {turn}. time:"}
                )
            except OSError as error:
                self.failures.append((0, repr(error)))
                continue
            except http.client.HTTPException as error:
                self.failures.append((0, repr(error)))
                continue
            if status == 200 and body.rstrip().endswith("[DONE]") and '"error"' not in body:
                self.served += 1
            else:
                self.failures.append((status, body[-300:]))


def wait_until(is_true, *, seconds, what):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)
